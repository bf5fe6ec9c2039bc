"""Define the interface between the decode loop and a model, a port or an mlx-lm model."""

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx

from ..cache.layer_cache import CachedModel, LayerCache
from ..ranks.group import Ranks
from .lm_head import NormedRows
from .prompt_rows import NO_ROWS, PromptRows
from .runtime import Runtime


class Target(CachedModel, Protocol):
    """The model that verifies, with MTP heads in `mtp` that draft for it; usually a `layers.port.Port`.

    Without heads or drafter `max_draft_tokens` is 0, and the methods for drafting (from `embed` on) are not called.
    max_draft_tokens: maximum drafts of heads or drafter in a cycle. runtime: its state other than the weights.
    taps: numbers of layers after which the residual stream is part of the hidden rows. drafter: replaces the heads.
    """

    layers: Sequence[Any]
    runtime: Runtime
    drafter: Any

    @property
    def report(self) -> Any: ...

    @property
    def ranks(self) -> Ranks | None: ...

    @property
    def vision(self) -> Any: ...

    @property
    def max_draft_tokens(self) -> int: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    def hidden(self, tokens: mx.array, cache: Sequence[LayerCache], rows: PromptRows = NO_ROWS) -> mx.array:
        """Append tokens [n, L] to the caches; return the hidden rows [n, L, H] that `logits` and `capture` take.

        rows: embeddings and positions instead of the tokens' own, for rows of a picture; only prefill passes them.
        """
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """Return logits [1, M, V] of hidden rows [1, M, H], as `hidden` returns them."""
        ...

    def choice(self, hidden: mx.array) -> NormedRows | None:
        """Return `NormedRows`, which choose n * M tokens for hidden rows [n, M, H]; None: choose from `logits`."""
        ...

    def parameters(self) -> Any: ...

    def modules(self) -> Sequence[Any]: ...

    def load_weights(self, weights: Any, /, strict: bool = True) -> Any: ...

    def get(self, name: str, default: Any = None, /) -> Any: ...

    def normed(self, hidden: mx.array) -> mx.array:
        """Return hidden rows after the final norm, as the LM head reads them: [..., H]."""
        ...

    def capture(self, hidden: mx.array) -> mx.array:
        """Return the first head's input, [n, L, H], for the target's hidden rows."""
        ...

    def embed(self, tokens: mx.array, depth: int | None = 0) -> mx.array:
        """Return embeddings [..., H] of tokens [...] for the head of `depth`, or for the target (None)."""
        ...

    def draft_logits(self, depth: int, output: mx.array) -> mx.array:
        """Return logits [..., n] of a head's output rows [..., H]; `mtp[depth].token` maps the n rows to tokens."""
        ...

    def draft_choice(self, depth: int, output: mx.array) -> mx.array:
        """Return the indices of the greatest `draft_logits` of output rows [n, 1, H], int32 [n, 1]."""
        ...

    def draft_rows(self, depth: int, output: mx.array) -> NormedRows | None:
        """Return `NormedRows`, which choose drafts for output rows [n, 1, H]; None: choose from `draft_logits`."""
        ...
