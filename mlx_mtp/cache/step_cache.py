"""State what a step of the decode loop may do with the caches of one sequence or of several."""

from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from .layer_cache import CachedModel


class CacheArrays(NamedTuple):
    """The arrays of a StepCache that a step reads and writes; those of a drafter without a part in it are left out.

    ends: where the target stands, and the drafter if it follows: int32 [n], or an int while the host counts.
    """

    ends: tuple[Any, Any]
    parts: list[Any]
    kept: list[mx.array]


class CacheForm(Protocol):
    """All of a StepCache that a recorded step depends on besides its arrays; hashable."""

    def made(self, model: CachedModel) -> "StepCache":
        """Make a cache of this form that holds no arrays."""
        ...


class StepCache(Protocol):
    """The caches of n sequences: a `PromptCache` holds one, a `Pool` several.

    layers: the target's, all of which stand at the same positions. heads: the drafter's own.
    kept:   what a drafter carries from one step to the next besides its caches, [n, 1, H] each.
    live:   the drafter has a part in the step: it reads the rows before, and its caches follow the target.
    starts: below which positions each cache of the step holds nothing, as inputs of a recorded step.
    """

    layers: list[Any]
    heads: list[Any]
    kept: list[mx.array]
    live: bool
    starts: Any

    @property
    def stepped(self) -> list[Any]:
        """The caches that have a part in the step."""
        return [*self.layers, *self.heads] if self.live else self.layers

    def unload(self) -> CacheArrays:
        """Give out what a step reads and writes."""
        ends = self.layers[0].offset, self.heads[0].offset if self.live and self.heads else None
        return CacheArrays(ends, [c.parts for c in self.stepped], self.kept if self.live else [])

    def load(self, arrays: CacheArrays, limit: int, heads_limit: int) -> None:
        """Take in what `unload` gave out, and bounds of where the target and the drafter now stand."""
        parts = iter(arrays.parts)
        for c in self.layers:
            c.seek(arrays.ends[0], limit)
            c.parts = next(parts)
        for c in self.heads if self.live else ():
            c.seek(arrays.ends[1], heads_limit)
            c.parts = next(parts)
        self.kept = arrays.kept if self.live else self.kept

    def rollback(self, n: mx.array) -> None:
        """Take back the last n positions of each sequence in the target's caches, int32 [n] on the device."""
        seek(self.layers, self.layers[0].offset - n, self.layers[0].limit)

    def heads_follow(self) -> None:
        """Move the drafter's caches to where the target stands."""
        seek(self.heads, self.layers[0].offset, self.layers[0].limit)

    def mark(self) -> Any:
        """Note the state now; keys and values are not written in place while this is held."""
        ...

    def restore(self, mark: Any) -> None:
        """Go back to a mark."""
        ...

    def form(self) -> CacheForm:
        """Return the form of a step on these caches."""
        ...


def seek(caches: list[Any], offset: Any, limit: int) -> None:
    """Set the position of each cache, and its upper bound on the host."""
    for c in caches:
        c.seek(offset, limit)
