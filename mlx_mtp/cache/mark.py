"""Note a moment of a PromptCache, to go back to."""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Quantizing:
    """Quantize the target's caches before position `start` is read."""

    start: int
    bits: int
    group_size: int


@dataclass
class Mark:
    """A PromptCache's state at one moment, to go back to: references only, nothing is copied.

    held:   (cache, parts, start) of those that a lower offset does not bring back: states, and where the moment is at
            rest wrapped windows too, of which the first write after it makes a copy.
    caches: (cache, offset, limit, parts) of all; None where a later write may be in place.
    """

    length: int
    primed: int
    kept: list[mx.array]
    backlog: list[mx.array]
    held: list[tuple]
    caches: list[tuple] | None
    quantizing: Quantizing | None

    def release(self) -> None:
        """Release keys and values, so that the next write to them is in place; states are replaced, not written."""
        self.caches = None
