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
    """

    layers: Sequence[Any]
    runtime: Runtime

    @property
    def report(self) -> Any: ...

    @property
    def ranks(self) -> Ranks | None: ...

    @property
    def max_draft_tokens(self) -> int: ...

    def hidden(self, tokens: mx.array, cache: Sequence[LayerCache]) -> mx.array:
        """Read tokens [1, L] into the caches; return the hidden rows [1, L, H] that `logits` and `capture` take."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """Return logits [1, M, V] of hidden rows [1, M, H]."""
        ...

    def choice(self, hidden: mx.array) -> Rows | None:
        """Return what chooses tokens of hidden rows [1, M, H] without logits; None where they must be computed."""
        ...

    def parameters(self) -> Any: ...

    def modules(self) -> Sequence[Any]: ...

    def load_weights(self, weights: Any, /, strict: bool = True) -> Any: ...

    def get(self, name: str, default: Any = None, /) -> Any: ...

    def capture(self, hidden: mx.array) -> mx.array:
        """Return what the first head reads, [1, L, H], of the target's hidden rows."""
        ...

    def embed(self, tokens: mx.array, depth: int = 0) -> mx.array:
        """Return embeddings [..., H] of tokens [...] as the head of `depth` reads them."""
        ...

    def draft_logits(self, depth: int, output: mx.array) -> mx.array:
        """Return logits [..., n] of a head's output rows [..., H]; `mtp[depth].token` names the n tokens."""
        ...

    def draft_choice(self, depth: int, output: mx.array) -> mx.array:
        """Return the number of the greatest of an output row's `draft_logits`, int32 []."""
        ...

    def draft_rows(self, depth: int, output: mx.array) -> Rows | None:
        """Return what chooses a draft of an output row [1, 1, H] without logits; None where they must be computed."""
        ...
