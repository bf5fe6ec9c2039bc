"""Make a `target.Target` of mlx-lm's own Model, for a family without a port: `Made` with drafts, or `Plain` without.

A made port's forward stays mlx-lm's. The output of the module that contains the layers is the hidden rows, and what
the forward does after it makes the logits. Without such a module the logits are the hidden rows. Where each layer
is called once and in order, the outputs of layers can be captured for drafters. `checkpoint.probe` shows on the
loaded weights that a model supports this.
"""

import copy
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from ..cache.convolution import ConvolutionCache
from ..cache.from_mlx_lm import flat, passing
from ..cache.layer_cache import CacheKind
from ..cache.mlx_lm_caches import MlxLmCaches
from .made_form import NO_BITS, MadeForm
from .mtp_spec import MTPSpec
from .noted import giving, input_of, noting, stream_of, unnote, with_stream
from .prompt_rows import NO_ROWS, PromptRows
from .runtime import HasRuntime, Runtime
from .with_heads import WithHeads


class Plain(HasRuntime):
    """Mixin for mlx-lm's Model that adds the part of the `Target` interface that plain decoding needs."""

    mtp: Sequence[Any]
    axes: tuple = ()
    taps: Any = ()
    drafter: Any = None
    max_draft_tokens: Any = 0
    NO_KV_BITS: Any = NO_BITS
    vocab_size: int

    def __init__(self, args: Any):
        super().__init__(args)  # type: ignore[call-arg]
        self.runtime, self.mtp = Runtime(), []
        self.args = args  # some of mlx-lm's models do not keep it

    def become(self, mixin: type) -> None:
        """Change this model's mixin to `Made` or `Plain`."""
        self.__class__ = as_target(mixin, *type(self).__bases__[1:])  # type: ignore[assignment]

    def windows(self) -> list[Any]:
        return [MlxLmCaches]

    def head_windows(self) -> list[CacheKind]:
        return []

    def no_hidden(self) -> mx.array:
        return mx.zeros((1, 1, self.vocab_size))

    def hidden(self, tokens: mx.array, cache: Sequence[Any], rows: PromptRows = NO_ROWS) -> mx.array:
        """Return the logits [1, 1, V] after the last of the tokens [1, L]."""
        return cache[0].read(self, tokens)

    def logits(self, hidden: mx.array) -> mx.array:
        return hidden

    def choice(self, hidden: mx.array) -> Any:
        """Return None: the target's tokens are chosen from `logits`."""


class Made(WithHeads, Plain):
    """Mixin for mlx-lm's Model whose rows are read into this package's caches, so that they can be taken back.

    `form` must be set before any method is called (`checkpoint.probe`).
    """

    form: MadeForm
    spec = MTPSpec(tensors=())
    MASK_ARRAY = False

    @property
    def NO_KV_BITS(self) -> str | None:
        return self.form.no_bits

    @property
    def head_dim(self) -> int:
        return self.form.head_dim

    @property
    def width(self) -> int:
        return self.form.width

    def windows(self) -> list[Any]:
        return flat(self.form.kinds)

    def no_hidden(self) -> mx.array:
        return mx.zeros((1, 1, self.width), self.form.dtype)

    def hidden(self, tokens: mx.array, cache: Sequence[Any], rows: PromptRows = NO_ROWS) -> mx.array:
        """Append tokens [n, L] to the caches; return the inner module's rows, or the logits: [n, L, H].

        With `taps` the streams after these layers are concatenated to it along H.
        """
        form, taps = self.form, self.taps
        if form.inner is None:
            return self.forward(tokens, cache)
        numbers = sorted({max(number, 1) for number in taps})
        with noting([form.inner, *(form.layers[number - 1] for number in numbers)]) as (of_inner, *found):
            self.forward(tokens, cache)
        (inner,) = of_inner
        streams = {number: stream_of(call.output) for number, (call,) in zip(numbers, found, strict=True)}
        if 0 in taps:
            streams[0] = input_of(found[0][0])
        return mx.concatenate([inner.output, *(streams[i] for i in taps)], axis=-1) if taps else inner.output

    def forward(self, tokens: mx.array, cache: Sequence[Any]) -> mx.array:
        """Return the logits of mlx-lm's forward of tokens [n, L] on this package's caches, or on mlx-lm's."""
        kept = [c for c in cache if isinstance(c, ConvolutionCache)]
        with passing(cache, self.form.kinds, tokens.shape) as layers, noting(self.form.convolutions) as calls:
            logits = self(tokens, cache=layers)  # type: ignore[operator]
            for c, (call,) in zip(kept, calls, strict=True) if kept else ():
                c.input = call.given[0]
            return logits

    def normed(self, hidden: mx.array) -> mx.array:
        return hidden[..., : self.width] if self.taps else hidden

    def unembedding(self, depth: int | None = None) -> Any:
        if depth is not None and "head" in self.mtp[depth]:
            return self.mtp[depth]["head"]
        return partial(forward_after, self) if self.form.head is None else self.form.head

    @property
    def final_norm(self) -> Any:
        return self.form.norm

    @property
    def embedding(self) -> Any:
        return self.embedded if self.form.embedding is None else self.form.embedding

    def embedded(self, tokens: mx.array) -> mx.array:
        """Return what the first layer reads of tokens [n, L]: [n, L, H]."""
        form, first = self.form, self.form.layers[0]
        stream = mx.zeros((*tokens.shape, self.width), form.dtype)
        outputs = [with_stream(like, stream) for like in form.outputs]
        with giving(form.layers, outputs), noting([first]) as (calls,):
            self(tokens, cache=form.empty)  # type: ignore[operator]
        return input_of(calls[0])

    def logits(self, hidden: mx.array) -> mx.array:
        return hidden if self.form.inner is None else super().logits(hidden)

    def cached_layers(self) -> list[Any]:
        kinds = self.form.kinds[-len(self.form.layers) :]
        return [layer for layer, kind in zip(self.form.layers, kinds, strict=False) for _ in flat([kind])]

    def like_last_layer(self) -> Any:
        """Return a copy of the last layer with attention.

        ValueError if every layer has a recurrent state, or layers are not called with (x, mask, cache).
        """
        if len(self.form.layers) != len(self.form.kinds):
            raise ValueError("not every layer of the model has a cache of its own")
        last = self.last_attention()
        layer, output = self.form.layers[last], self.form.outputs[last]
        _, _, *called = inspect.signature(type(layer).__bases__[-1].__call__).parameters.values()
        needs_more = any(each.default is each.empty for each in called[2:] if each.kind is each.POSITIONAL_OR_KEYWORD)
        if [each.name for each in called[:2]] != ["mask", "cache"] or needs_more or output is not stream_of(output):
            raise ValueError("its layers are not called as (x, mask, cache), so that no head can be like them")
        copied = copy.deepcopy(layer)
        unnote(copied)
        return copied


def as_target(mixin: type, *model: type) -> Any:
    """Return the class of mlx-lm's Model, the last class of `model`, with a mixin, in the family's module."""
    return type("Model", (mixin, *model), {"__module__": model[-1].__module__})


def forward_after(model: Any, rows: mx.array) -> mx.array:
    """Return what a made port's forward makes of the inner module's rows [..., H]: logits [..., V]."""
    form, three = model.form, rows[None] if rows.ndim == 2 else rows
    with giving([form.inner], [three]):
        logits = model(mx.zeros(three.shape[:2], mx.int32), cache=form.empty)
    return logits[0] if rows.ndim == 2 else logits
