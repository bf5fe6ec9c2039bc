"""Decide how much cycles of several texts draft: by what one of so many costs, and how often drafts are right."""

import time

from ..decoding.cycle import among_its_like
from ..decoding.policy import learned
from ..decoding.stats import WAITED
from ..layers.target import Target
from ..tuning.controller import Controller
from ..tuning.costs import GUESSED, Costs
from ..tuning.plan import Cycle, Fixed, Plan

Control = Controller | Fixed


class Controls:
    """A control for each number of sequences and limit of drafts: the cost of a draft depends on the rows beside it.

    replayed: cycles are replayed, which cost less than built ones.
    """

    def __init__(self, model: Target, *, adaptive: bool, replayed: bool = False):
        self.model, self.adaptive, self.replayed = model, adaptive, replayed
        self._made: dict[tuple[int, int], Control] = {}

    def of(self, sequences: int, k: int) -> Control:
        """Return the control of cycles of this many sequences, of which one may draft k tokens and none more."""
        if (sequences, k) not in self._made:
            adaptive = self.adaptive and k > 0
            self._made[sequences, k] = self._controller(sequences, k) if adaptive else Fixed(k)
        return self._made[sequences, k]

    def _controller(self, sequences: int, k: int) -> Controller:
        """Make a controller that starts from the costs of this number of sequences, or of the nearest known one."""
        costs = learned(self.model)
        known = costs.together_replayed if self.replayed else costs.together
        if sequences not in known and known:
            known[sequences] = _guess(known[min(known, key=lambda n: abs(n - sequences))])
        control = Controller(max_drafts=k, known=known.get(sequences))
        known[sequences] = control.costs
        return control


def _guess(known: Costs) -> Costs:
    """Begin with what cycles of another number of texts taught, which are like these but cost otherwise."""
    guess = Costs()
    guess.levels, guess.wake, guess.row, guess.counts = known.levels, known.wake, known.row, known.counts
    guess.weights = {plan: min(GUESSED, weight) for plan, weight in known.weights.items()}
    return guess


def outcome(
    plan: Plan, verified: int, accepted: list[tuple[int, int]], seconds: float | None, caught_up: int
) -> Cycle:
    """Sum up a cycle of several texts as one of a text that is like their mean.

    accepted: of each text how many drafts, and how many it might have had.
    """
    n = len(accepted)
    depths = tuple(
        (sum(a > depth for a, _ in accepted) / n, sum(min(a + 1, most) > depth for a, most in accepted) / n)
        for depth in range(verified)
    )
    return Cycle(plan, verified, sum(a for a, _ in accepted) / n, seconds, caught_up, depths=depths)


class Clock:
    """Times cycles from one's arrival to the next one's. took: seconds of the last, without the caller's."""

    def __init__(self):
        self._arrival = self._left = self._caller = self.took = 0.0
        self.hidden = True  # something else was computed since the last arrival

    def resume(self) -> None:
        """Note that the caller's own time is over."""
        now = time.perf_counter()
        self._arrival, self._left = self._arrival or now, self._left or now
        self._caller = now - self._left

    def arrived(self, waited: float, built: float, following: float | None) -> float | None:
        """Return the seconds of the cycle that has just arrived; None where other work or the caller hides them.

        waited: for it. built: seconds that building it took. following: the next one, None if it was not built yet.
        """
        now = time.perf_counter()
        elapsed, self._arrival = now - self._arrival, now
        self.took = elapsed - self._caller
        hidden, self.hidden = self.hidden, False
        if following is None:
            return None if hidden else self.took
        if hidden or (waited < WAITED * elapsed and self._caller > WAITED * elapsed):
            return None
        return among_its_like(elapsed, waited, built, following)

    def leave(self) -> None:
        """Note that the caller goes on."""
        self._left = time.perf_counter()
