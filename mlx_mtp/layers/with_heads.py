"""Define the mixin of a target whose MTP heads, or another drafter, read its hidden rows."""

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..cache.layer_cache import CacheKind
from .lm_head import NormedRows, head_on, logits_of
from .mtp_spec import MTPSpec

# The layout of heads that `mlx-mtp tune-heads --new` makes for any family: one recycled layer like the target's last
# one, with the names of mlx-lm's parameters.
TUNED_PREFIX = "tuned_mtp."
TUNED = MTPSpec(
    prefix=r"tuned_mtp\.(\d+)\.",
    numbered="zero",
    tensors=tuple((name, name) for name in ("enorm", "hnorm", "eh_proj", "block", "norm", "d2t")),
)
DEFAULT_DRAFTS = 2  # of a recycled head, whose acceptance falls with each draft
MAX_RECYCLED = 15  # maximum drafts of one recycled MTP head: a cycle's rows must fit into a ring's slack


def default_draft_tokens(model: Any) -> int:
    """Return the default of num_draft_tokens: the drafter's `usual`, else one per head but at least DEFAULT_DRAFTS.

    At most the model's maximum: 1 with one head that is not recycled, 0 without a drafter.
    """
    own = getattr(getattr(model, "drafter", None), "usual", 0)
    return min(model.max_draft_tokens, own or max(DEFAULT_DRAFTS, len(model.mtp)))


class WithHeads:
    """Mixin of a `Target`: what its heads `mtp`, described by `spec`, or its drafter use.

    A hidden row is `width` numbers, and after these the streams of `taps`.
    """

    width: Any
    vocab_size: Any
    spec: MTPSpec
    mtp: Sequence[Any]
    drafter: Any = None  # drafts instead of the heads

    @property
    def final_norm(self) -> Any:
        """The norm before the LM head; those of heads are like it."""
        raise NotImplementedError

    @property
    def embedding(self) -> Any:
        """The target's embedding, as heads read it: a module, or a function of tokens [n, L] if it is none."""
        raise NotImplementedError

    def normed(self, hidden: mx.array) -> mx.array:
        """Norm rows from `hidden` for the LM head: [..., H]."""
        raise NotImplementedError

    def unembedding(self, depth: int | None = None) -> Any:
        """Return the LM head or the tied embedding; for an MTP head with its own LM head, that one."""
        raise NotImplementedError

    def windows(self) -> list[Any]:
        raise NotImplementedError

    @property
    def max_draft_tokens(self) -> int:
        if self.drafter is not None:
            return self.drafter.most
        return MAX_RECYCLED if self.spec.topology == "recycle" and len(self.mtp) == 1 else len(self.mtp)

    @property
    def taps(self) -> tuple[int, ...]:
        """Numbers of layers after which `hidden` captures the residual stream, too; 0 is before the first layer."""
        if self.drafter is not None:
            return self.drafter.reads
        return () if isinstance(self.spec.capture, str) else self.spec.capture

    def embed(self, tokens: mx.array, depth: int | None = 0) -> mx.array:
        head = None if depth is None else self.mtp[depth]
        return self.embedding(tokens) if head is None or "embed_tokens" not in head else head.embed_tokens(tokens)

    def logits(self, hidden: mx.array) -> mx.array:
        return logits_of(self.unembedding(), self.normed(hidden))

    def choice(self, hidden: mx.array) -> NormedRows | None:
        head = head_on(self.unembedding())
        return None if head is None else NormedRows(head, self.normed(hidden).flatten(0, 1))

    def capture(self, hidden: mx.array) -> mx.array:
        """Return an MTP head's input [..., H] for rows of `hidden`: before or after the final norm, or fused taps."""
        if not isinstance(self.spec.capture, str):
            return self.mtp[0].fused(hidden[..., self.width :])
        if self.spec.capture == "post":
            return self.normed(hidden)
        return hidden[..., : self.width] if self.taps else hidden

    def draft_logits(self, depth: int, output: mx.array) -> mx.array:
        return logits_of(self.unembedding(depth), self.mtp[depth].norm(output))

    def draft_choice(self, depth: int, output: mx.array) -> mx.array:
        rows = self.draft_rows(depth, output)
        if rows is None:
            return mx.argmax(self.draft_logits(depth, output), axis=-1).astype(mx.int32)
        return rows.greedy().reshape(output.shape[:2])

    def draft_rows(self, depth: int, output: mx.array) -> NormedRows | None:
        head = head_on(self.unembedding(depth))
        return None if head is None else NormedRows(head, self.mtp[depth].norm(output).flatten(0, 1))

    def cached_layers(self) -> list[Any]:
        """Return the layers that have a cache."""
        return list(self.layers)  # type: ignore[attr-defined]

    def like_last_layer(self) -> Any:
        """Return a copy of the last layer with attention; ValueError if every layer has a recurrent state."""
        return copy.deepcopy(self.cached_layers()[self.last_attention()])

    def last_attention(self) -> int:
        """Return the index, among the layers with a cache, of the last one with attention; ValueError without one."""
        kinds = [(i, kind) for i, kind in enumerate(self.windows()) if kind is None or isinstance(kind, int)]
        if not kinds:
            raise ValueError("no layer of the model has attention, of which a new head could be made")
        return kinds[-1][0]

    def head_windows(self) -> list[CacheKind]:
        if self.drafter is not None:
            return [*self.drafter.windows]
        if self.spec.prefix == TUNED.prefix and self.mtp:
            return [self.windows()[self.last_attention()]]
        return [head.window for head in self.mtp]
