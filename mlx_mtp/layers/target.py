"""State what the decode loop asks of a model, whichever port or mlx-lm model it is."""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from ..cache.layer_cache import CachedModel, LayerCache
from ..ranks.group import Ranks
from .lm_head import Rows
from .runtime import Runtime


class Target(CachedModel, Protocol):
    """The model that verifies, with the MTP heads in `mtp` that draft for it; `layers.port.Port` is the usual one.

    Without heads `max_draft_tokens` is 0, and what only drafting asks for (from `embed` on) is never called.
    max_draft_tokens: most drafts of its heads in a cycle. runtime: its state beside the weights.
    taps: numbers of layers whose residual stream hidden rows have, too. drafter: drafts in place of heads.
    """

    layers: Sequence[Any]
    runtime: Runtime
    drafter: Any

    @property
    def report(self) -> Any: ...

    @property
    def ranks(self) -> Ranks | None: ...

    @property
    def max_draft_tokens(self) -> int: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    def hidden(self, tokens: mx.array, cache: Sequence[LayerCache]) -> mx.array:
        """Read tokens [n, L] into the caches; return the hidden rows [n, L, H] that `logits` and `capture` take."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """Return logits [1, M, V] of hidden rows [1, M, H]."""
        ...

    def choice(self, hidden: mx.array) -> Rows | None:
        """Return what chooses the n * M tokens of hidden rows [n, M, H]; None where logits must be computed."""
        ...

    def parameters(self) -> Any: ...

    def modules(self) -> Sequence[Any]: ...

    def load_weights(self, weights: Any, /, strict: bool = True) -> Any: ...

    def get(self, name: str, default: Any = None, /) -> Any: ...

    def normed(self, hidden: mx.array) -> mx.array:
        """Return hidden rows as the LM head reads them."""
        ...

    def capture(self, hidden: mx.array) -> mx.array:
        """Return what the first head reads, [1, L, H], of the target's hidden rows."""
        ...

    def embed(self, tokens: mx.array, depth: int | None = 0) -> mx.array:
        """Return embeddings [..., H] of tokens [...] as the head of `depth` reads them, None: as the target does."""
        ...

    def draft_logits(self, depth: int, output: mx.array) -> mx.array:
        """Return logits [..., n] of a head's output rows [..., H]; `mtp[depth].token` names the n tokens."""
        ...

    def draft_choice(self, depth: int, output: mx.array) -> mx.array:
        """Return the numbers, int32 [n, 1], of the greatest of the `draft_logits` of output rows [n, 1, H]."""
        ...

    def draft_rows(self, depth: int, output: mx.array) -> Rows | None:
        """Return what chooses drafts of output rows [n, 1, H] without logits; None where they must be computed."""
        ...
