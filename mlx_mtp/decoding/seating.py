"""Define what a driver needs of the step cache of its sequences: of one on its own cache, or of several in a pool."""

from concurrent.futures import Executor
from typing import Any, NamedTuple

import mlx.core as mx

from ..cache.step_cache import StepCache
from ..layers.target import Target
from ..tuning.kernel_fallback import Trouble
from ..tuning.plan import Plan
from .drafters.drafter import Drafter
from .flight import Flight
from .replay import Compiled
from .run import Run
from .sequence import Sequence
from .stats import Stats

Waiting = list[tuple[Sequence, Run]]  # sequences with a cache at rest, and the row that chose the last token of each


class DriverOptions(NamedTuple):
    """Options of a driver: of `generate_step`, and `chunk`, the maximum rows of a prefill chunk."""

    chunk: int
    adaptive: bool = True
    p_min: float = 0.0
    compile_cycles: bool | None = None


class Seating:
    """The sequences of a step cache (`Alone`: one, `Pooled`: several), and how the cache follows a cycle.

    drafters: by their names in plans. compiled: replays recorded cycles; None to build every cycle. stats: counts new
    records. p_min: minimum probability of a verified draft, in cycles whose plan has p_min. thread: the executor of
    `mask_thread`. first: the cycle, already read, after which the first one is built, if there is one. stopping: no
    cycle may be submitted after the last one. defers: a cycle that is built late begins after the tokens before it
    have been yielded. drafts_evaluated: the drafts of the cycle being built were evaluated, so that the drafter's
    caches have been written. reread: accepted rows are read again before the cycle that was begun late last.
    """

    model: Target
    drafters: dict[str, Drafter]
    compiled: Compiled | None
    stats: Stats
    p_min: float
    thread: Executor
    stopping: bool
    defers: bool
    drafts_evaluated = reread = False

    @property
    def cache(self) -> StepCache: ...

    @property
    def first(self) -> Flight | None: ...

    def agree(self) -> None:
        """Run each kernel that the next graph launches for the first time; raises KernelRefused if one is refused."""

    def why_late(self, last: Flight) -> str | None:
        """Return why the cycle after `last` cannot be built before `last` is read; None if it can."""

    def begin_late(self, last: Any) -> float:
        """Prepare for a cycle that is built after `last` was read; return the maximum number of its drafts."""
        ...

    def plan(self, active: list[Sequence]) -> tuple[Any, Plan, int]:
        """Return the control, its plan for the next cycle, and the longest match for prompt lookup, in tokens."""
        ...

    def arrange(self, last: Any, new: Flight, joining: Waiting) -> tuple[Run, int]:
        """Set `rows`, `before` and `prefilled` of the planned cycle `new`; a paused drafter that resumes reads rows.

        Returns the run of these rows in the previous cycle, and an upper bound of the position of its first row.
        """
        ...

    def enter(self, plan: Plan, run: Run, base: int) -> tuple[Run, int, Drafter | None]:
        """Move the drafter into or out of the step; return the step's input, its position and its drafter or None."""
        ...

    def place(self, plan: Plan, run: Run, base: int, *, replayed: bool) -> None:
        """Move the target's position to the device or the host, as the step needs it."""

    def limits(self, new: Flight, k: int, *, replayed: bool = False) -> mx.array | None:
        """Return the maximum number of drafts that each row of a step with k drafts may accept; None for no limit."""

    def built(self, new: Flight) -> None:
        """Mark the step cache after a cycle that was just built, if sequences are copied out of it."""

    def begin_drafts(self, last: Any, new: Flight) -> None:
        """Release marks before the drafts of `new` are evaluated, which writes the drafter's caches."""

    def end_drafts(self, new: Flight) -> None:
        """Keep what a failure of the rest of the step requires."""

    def release(self, last: Any, new: Flight) -> None:
        """Release marks before `new` is submitted: buffers are written in place only if nothing refers to them."""

    def advance(self, last: Any, new: Flight) -> None:
        """Keep the accepted rows of `last` for a drafter that has not read them; move on to the cycle `new`."""

    def finish(self, flight: Flight, row: int, count: int) -> None:
        """Take out the sequence of a row, which ends with `count` tokens of a cycle that was read."""

    def was_read(self, flight: Flight, found: list[Any]) -> None:
        """Note that a cycle was read, whose tokens are yielded next."""

    def leave(self, last: Any) -> Waiting:
        """Bring unfinished sequences' own caches to rest after a read cycle; return each with its last row's Run."""
        ...

    def recovered(self, error: Trouble, last: Any, active: list[Sequence]) -> Waiting:
        """Return as `leave` does, after an error: kernels may have lost the arrays of the caches."""
        ...

    def vote(self, error: Trouble) -> None:
        """Report a refused kernel of this rank to the others, which wait for it."""

    def abandon(self) -> None:
        """Note that an error ends the generation: caches whose arrays are lost are not prefilled again."""
