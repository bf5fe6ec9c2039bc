"""Record the state of a PromptCache, so that it can be restored."""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class Quantizing:
    """A pending request: before position `start` is read, quantize the target's caches to `bits` bits per value.

    group_size: number of values that share a scale.
    """

    start: int
    bits: int
    group_size: int


@dataclass
class Mark:
    """A recorded state of a PromptCache; references to arrays, nothing is copied.

    length: number of tokens held. live, primed, kept, backlog, heads, aside, quantizing: those fields of the
        PromptCache.
    held:   (cache, parts, start) of the target's recurrent states; in a snapshot of all recurrent states and rings:
        a lower offset does not restore these. The first later write to such a ring copies it.
    caches: (cache, offset, limit, parts, fresh) of all caches, whose next write is a copy. None in a snapshot and
        after `release`: a restore leaves positions, and all keys and values that are not in `held`, as they are.
    """

    length: int
    live: bool
    primed: int
    kept: list[mx.array]
    backlog: list[mx.array]
    heads: list
    aside: tuple[list, list[mx.array]] | None
    held: list[tuple]
    caches: list[tuple] | None
    quantizing: Quantizing | None

    def release(self) -> None:
        """Drop the references to keys and values, so that the next write to them is in place.

        Recurrent states stay in the mark, because a later step replaces them instead of writing into them.
        """
        self.caches = None
