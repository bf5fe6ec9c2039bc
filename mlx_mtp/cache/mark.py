"""Record the state of a PromptCache, so that it can be restored."""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Quantizing:
    """The request to quantize the target's caches before position `start` is read."""

    start: int
    bits: int
    group_size: int


@dataclass
class Mark:
    """A recorded state of a PromptCache; references to arrays, nothing is copied.

    held:   (cache, parts, start) of recurrent states and, between generations, of wrapped windows: a lower offset
        does not restore these. The first later write to such a window copies it.
    caches: (cache, offset, limit, parts) of all caches; None if later writes may be in place.
    """

    length: int
    primed: int
    kept: list[mx.array]
    backlog: list[mx.array]
    held: list[tuple]
    caches: list[tuple] | None
    quantizing: Quantizing | None

    def release(self) -> None:
        """Release keys and values, so that the next write is in place; recurrent states are replaced, not written."""
        self.caches = None
