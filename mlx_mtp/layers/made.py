"""Make a `target.Target` of mlx-lm's own Model, for a family without a port: `Made` with drafts, or `Plain` without.

Of a made port only rows and logits are used, and its forward stays mlx-lm's. The output of the module that contains
the layers is the hidden rows, and what the forward does after it makes the logits. Without such a module the logits
are the hidden rows. `checkpoint.probe` shows on the loaded weights that a model supports this.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_caches_of

from ..cache.from_mlx_lm import kind_of
from ..cache.layer_cache import CacheKind
from ..cache.mlx_lm_caches import MlxLmCaches
from ..cache.ring import Ring
from .prompt_rows import NO_ROWS, PromptRows
from .runtime import HasRuntime, Runtime

NO_BITS = "a family that has no port"
CLOSE = 0.02  # greatest `distance` of the same rows, made in passes of different sizes, in bfloat16
TINY = 1e-30


class Inner:
    """Mixin of the module that contains the layers: stores its output, or returns `given` and computes nothing."""

    given: mx.array | None = None
    rows: Any = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self.given is not None:
            return self.given
        rows = super().__call__(*args, **options)  # type: ignore[misc]
        object.__setattr__(self, "rows", rows)  # an nn.Module would make it a parameter
        return rows


class Plain(HasRuntime):
    """Mixin for mlx-lm's Model that adds the part of the `Target` interface that plain decoding needs."""

    mtp: tuple = ()
    axes: tuple = ()
    taps: tuple = ()
    drafter: Any = None
    max_draft_tokens: Any = 0
    NO_KV_BITS: str | None = NO_BITS
    vocab_size: int

    def __init__(self, args: Any):
        super().__init__(args)  # type: ignore[call-arg]
        self.runtime = Runtime()

    def become(self, mixin: type) -> None:
        """Change this model's mixin to `Made` or `Plain`."""
        self.__class__ = type("Model", (mixin, *type(self).__bases__[1:]), {})  # type: ignore[assignment]

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

    def choice(self, hidden: mx.array) -> None:
        """Return None: the target's tokens are chosen from `logits`."""


@dataclass
class MadeForm:
    """What a made port consists of besides mlx-lm's model.

    kinds: of the layers' caches. inner: the module that contains the layers; None if the logits are the hidden rows.
    width, dtype: of a hidden row. no_bits: why keys and values cannot be quantized. head_dim: a number that divides
    every head size of quantized keys and values.
    """

    kinds: list[CacheKind | Ring]
    inner: Any
    width: int = 0
    dtype: mx.Dtype = mx.float32
    no_bits: str | None = NO_BITS
    head_dim: int = 0


class Made(Plain):
    """Mixin for mlx-lm's Model whose rows are read into this package's caches, so that they can be taken back.

    `take_form` must be called before any other method.
    """

    form: MadeForm

    @property
    def max_draft_tokens(self) -> int:  # type: ignore[override]
        return 0 if self.drafter is None else self.drafter.most

    @property
    def NO_KV_BITS(self) -> str | None:  # type: ignore[override]
        return self.form.no_bits

    @property
    def head_dim(self) -> int:
        return self.form.head_dim

    def windows(self) -> list[Any]:
        return list(self.form.kinds)

    def head_windows(self) -> list[CacheKind]:
        return [] if self.drafter is None else [*self.drafter.windows]

    def no_hidden(self) -> mx.array:
        return mx.zeros((1, 1, self.form.width), self.form.dtype)

    def hidden(self, tokens: mx.array, cache: Sequence[Any], rows: PromptRows = NO_ROWS) -> mx.array:
        """Append tokens [n, L] to the caches; return the inner module's rows, or the logits: [n, L, H]."""
        logits, inner = self(tokens, cache=list(cache)), self.form.inner  # type: ignore[operator]
        if inner is None:
            return logits
        found, inner.rows = inner.rows, None
        return found

    def logits(self, hidden: mx.array) -> mx.array:
        if (inner := self.form.inner) is None:
            return hidden
        object.__setattr__(inner, "given", hidden)
        try:
            return self(mx.zeros(hidden.shape[:2], mx.int32), cache=[None] * len(self.form.kinds))  # type: ignore[operator]
        finally:
            inner.given = None

    def take_form(self, tokens: mx.array) -> None:
        """Find `form` by forwards of tokens [1, L]; ValueError for layers whose caches this package does not have."""
        self.form = MadeForm([kind_of(cache) for cache in mlx_lm_caches_of(self)], None)  # type: ignore[arg-type]
        for module in _with_layers(self):
            kind = type(module)
            module.__class__, self.form.inner = type(kind.__name__, (Inner, kind), {}), module
            if self._is_inner(tokens):
                break
            module.__class__, self.form.inner = kind, None
        rows = self.hidden(tokens, mlx_lm_caches_of(self))  # type: ignore[arg-type]
        self.form.width, self.form.dtype = rows.shape[-1], rows.dtype

    def _is_inner(self, tokens: mx.array) -> bool:
        """Return whether each row of the logits of tokens [1, L] is made of the same row of `form.inner`'s output."""
        whole = self(tokens, cache=mlx_lm_caches_of(self))  # type: ignore[operator, arg-type]
        rows = self.form.inner.rows
        if not isinstance(rows, mx.array) or rows.ndim != 3 or rows.shape[:2] != tokens.shape:
            return False
        if not mx.array_equal(self.logits(rows), whole).item():
            return False
        alone = mx.concatenate([self.logits(rows[:, i : i + 1]) for i in range(tokens.shape[1])], axis=1)
        return distance(alone, whole) < CLOSE


def distance(found: mx.array, expected: mx.array) -> float:
    """Return the greatest difference of two arrays relative to the greatest absolute value expected, or NaN."""
    found, expected = found.astype(mx.float32), expected.astype(mx.float32)
    difference: Any = mx.abs(found - expected).max() / mx.maximum(mx.abs(expected).max(), TINY)
    return difference.item()


def _with_layers(model: Any) -> Iterator[nn.Module]:
    """Yield the modules inside a model, but not inside its layers, that have a list of modules; outer ones first."""
    for path, module in sorted(model.named_modules(), key=lambda named: len(named[0])):
        lists = (child for child in module.values() if isinstance(child, list) and child)
        if path and not re.search(r"\.\d+(\.|$)", path) and any(isinstance(each[0], nn.Module) for each in lists):
            yield module
