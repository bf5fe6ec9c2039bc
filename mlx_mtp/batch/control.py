"""Decide how much cycles of several texts draft: by what one of so many costs, and how often drafts are right."""

from typing import Any

from ..decoding.policy import learned, source_of
from ..layers.target import Target
from ..tuning.controller import Controller
from ..tuning.costs import PRIOR_WEIGHT, Costs
from ..tuning.plan import Cycle, Fixed, Plan

Control = Controller | Fixed


class Controls:
    """A control for each number of sequences and limits of drafts: the cost of a draft depends on the rows beside it.

    p_min: whether reading the drafter's confidence may be tried. replayed: cycles are replayed, which cost less than
    built ones.
    """

    def __init__(self, model: Target, *, adaptive: bool, p_min: bool = False, replayed: bool = False):
        self.model, self.adaptive, self.p_min, self.replayed = model, adaptive, p_min, replayed
        self._made: dict[tuple[int, int, int], Control] = {}

    def control(self, sequences: int, k: int, max_lookup: int = 0) -> Control:
        """Return the control of cycles of this many sequences.

        One of them may draft k tokens, and look up max_lookup, and none more.
        """
        key = sequences, k, max_lookup
        if key not in self._made:
            how = {"max_lookup": max_lookup, "p_min": self.p_min, "source": source_of(self.model)}
            adaptive = self.adaptive and (k or max_lookup)
            self._made[key] = self._controller(sequences, k, how) if adaptive else Fixed(k, **how)
        return self._made[key]

    def _controller(self, sequences: int, k: int, how: dict[str, Any]) -> Controller:
        """Make a controller that starts from the costs of this number of sequences, or of the nearest known one."""
        costs = learned(self.model)
        known = costs.together_replayed if self.replayed else costs.together
        if sequences not in known and known:
            known[sequences] = _guess(known[min(known, key=lambda n: abs(n - sequences))])
        control = Controller(max_drafts=k, known=known.get(sequences), **how)
        known[sequences] = control.costs
        return control


def _guess(known: Costs) -> Costs:
    """Begin with what cycles of another number of texts taught, which are like these but cost otherwise."""
    guess = Costs()
    guess.levels, guess.resume, guess.row, guess.counts = known.levels, known.resume, known.row, known.counts
    guess.weights = {plan: min(PRIOR_WEIGHT, weight) for plan, weight in known.weights.items()}
    return guess


def outcome(
    plan: Plan,
    verified: int,
    accepted: list[tuple[int, int]],
    seconds: float | None,
    caught_up: int,
    matched: int = 0,
) -> Cycle:
    """Sum up a cycle of several texts as one of a text that is like their mean.

    accepted: of each text how many drafts, and how many it might have had.
    """
    n = len(accepted)
    depths = tuple(
        (sum(a > depth for a, _ in accepted) / n, sum(min(a + 1, most) > depth for a, most in accepted) / n)
        for depth in range(verified)
    )
    return Cycle(plan, verified, sum(a for a, _ in accepted) / n, seconds, caught_up, matched, depths)
