"""Define the interface between the decode loop and a model, a port or an mlx-lm model."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx

from ..cache.layer_cache import CachedModel, LayerCache
from .lm_head import Rows


class Target(CachedModel, Protocol):
    """The model that verifies, with MTP heads in `mtp` that draft for it; usually a `layers.port.Port`.

    Without heads `max_draft_tokens` is 0, and the methods for drafting (from `embed` on) are never called.
    max_draft_tokens: maximum drafts of its heads in a cycle. report: facts of its load (`checkpoint.report.Report`).
    untested: the part of the load that is deferred until the heads first draft; it may warn or raise ValueError.
    """

    layers: Sequence[Any]
    untested: Callable[[], None] | None
    report: Any
    _learned: Any  # measured costs of its cycles
    _recorder: Any  # its recorded cycles

    @property
    def max_draft_tokens(self) -> int: ...

    def hidden(self, tokens: mx.array, cache: Sequence[LayerCache]) -> mx.array:
        """Append tokens [1, L] to the caches; return the hidden rows [1, L, H] that `logits` and `capture` take."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """Return logits [1, M, V] of hidden rows [1, M, H]."""
        ...

    def choice(self, hidden: mx.array) -> Rows | None:
        """Return an object that chooses tokens for hidden rows [1, M, H], or None if logits are needed."""
        ...

    def parameters(self) -> Any: ...

    def modules(self) -> Sequence[Any]: ...

    def load_weights(self, weights: Any, /, strict: bool = True) -> Any: ...

    def get(self, name: str, default: Any = None, /) -> Any: ...

    def capture(self, hidden: mx.array) -> mx.array:
        """Return the first head's input, [1, L, H], for the target's hidden rows."""
        ...

    def embed(self, tokens: mx.array, depth: int = 0) -> mx.array:
        """Return embeddings [..., H] of tokens [...] for the head of `depth`."""
        ...

    def draft_logits(self, depth: int, output: mx.array) -> mx.array:
        """Return logits [..., n] of a head's output rows [..., H]; `mtp[depth].token` maps the n rows to tokens."""
        ...

    def draft_choice(self, depth: int, output: mx.array) -> mx.array:
        """Return the index of the greatest of an output row's `draft_logits`, int32 []."""
        ...

    def draft_rows(self, depth: int, output: mx.array) -> Rows | None:
        """Return an object that chooses a draft for an output row [1, 1, H], or None if logits are needed."""
        ...
