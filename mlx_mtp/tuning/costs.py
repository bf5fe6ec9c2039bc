"""Estimate the costs of cycles in plain steps from their measured seconds, across sequences.

The logarithm of a cycle's seconds is the machine's pace (that of a plain step) plus the level of its plan. A level is
a decaying mean; the pace takes a share of each deviation. A plan without measurements is estimated from the nearest
measured one, whose cost above a plain step is scaled by `Growth`. Resuming a paused drafter costs a constant and the
same amount per row.

The cost of a row depends on the context, so each doubling of it, an octave, has its own levels. At first they are
those of the octave before; each plan measured in the new one moves the plans that are not.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice, repeat

from .plan import PLAIN, Plan

ALLOWANCE = 3.0  # the budget at the start: plain steps that drafting may lose
DRAFT_STEPS, ROW_STEPS = 0.25, 0.01  # plain steps of a draft, and of a row of a resuming drafter, before measurements
RESUME_ROWS = 10  # rows whose cost is the initial cost of resuming
PRIOR_ACCEPTANCE = 0.6  # share of accepted drafts before any was verified
DECAY = 0.98  # factor of all weights and counts per cycle
PACE_SHARE = 0.15  # share of a deviation that is attributed to the pace
PRIOR_WEIGHT = 0.5  # cycles, or drafts, that an estimate without measurements counts as
OCTAVE = 4096  # positions below which all contexts cost alike
OUTLIER = 1.0  # deviation of a logarithm above which a cycle was disturbed, as by a compilation

Growth = Callable[[int], float]  # number of drafts -> what they cost, in any unit


def dense(drafts: int) -> float:
    """Return what a number of drafts costs, in any unit, if all rows read the same weights: each adds as much."""
    return float(drafts)


def mixture(experts: int, per_token: int) -> Growth:
    """Return the Growth of a mixture of experts: the expected share of experts that only the drafts' rows use.

    experts: per layer; per_token: used by one row.
    """
    unused = 1 - per_token / experts
    return lambda drafts: unused * (1 - unused**drafts)


def accepted_shares(counts: Iterable[Sequence[float]], depths: int, prior: float) -> list[float]:
    """Return the estimated share of accepted drafts at each depth, if all before were accepted.

    counts: [accepted, verified] per depth. A depth without counts is accepted as often as the one before, the first
    one `prior` of the times.
    """
    p, shares = prior, []
    for right, seen in islice(chain(counts, repeat((0.0, 0.0))), depths):
        p = (PRIOR_WEIGHT * p + right) / (PRIOR_WEIGHT + seen)
        shares.append(p)
    return shares


def _distance(near: Plan, plan: Plan) -> tuple[bool, bool, bool, bool, int, bool]:
    """Return how unlike two plans are, the first difference first: the most alike measured one gives a plan's cost.

    A tree's cost is that of a chain with as many drafts until it is measured; a chain's is never a tree's.
    """
    other, foreign = near.source != plan.source, near.tree and not plan.tree
    return not near.k, other, foreign, near.stepwise != plan.stepwise, abs(near.k - plan.k), near.tree != plan.tree


class Costs:
    """Measured costs of plans, counts of accepted drafts, and the budget of drafting, across sequences."""

    def __init__(self):
        self.levels = {PLAIN: 0.0}  # logarithms of plain steps
        self.weights = {PLAIN: 0.0}  # decayed number of measured cycles per plan
        self.octave = 0  # of the context that levels and weights belong to
        self.octaves: dict[int, tuple[dict[Plan, float], dict[Plan, float]]] = {}  # levels and weights of the others
        self.growth: Growth = dense
        self._carried: set[Plan] = set()  # plans whose level is that of another context
        self.pace: float | None = None  # logarithm of seconds; None before the first measurement
        self.pace_at_plain = 0.0  # the pace after the last plain step
        self.excess = 0.0  # plain steps above the estimates that drafting took since the last plain step
        self.plain_first = 3  # plain steps before the first drafts, as the reference of all costs
        self.resume, self.row = RESUME_ROWS * ROW_STEPS, ROW_STEPS  # plain steps of resuming the drafter, and per row
        self.counts: dict[str, list[list[float]]] = {}  # per kind of drafts and depth: [accepted, verified]
        self.budget = ALLOWANCE  # plain steps that drafting may lose
        self.elapsed = 0.0  # plain steps
        self.retry_at: dict[str, float] = {}  # per kind of drafts that does not pay: `elapsed` of its next trial
        self._outliers: set[Plan] = set()  # plans whose last cycle was an outlier

    def resume_steps(self, rows: int) -> float:
        """Estimate the time, in plain steps, that a paused drafter needs for `rows` pending rows; 0 without any."""
        return self.resume + self.row * rows if rows else 0.0

    def steps(self, plan: Plan) -> float:
        """Estimate the cost of a plan's cycle in plain steps; more than 1 with drafts."""
        if not plan.k:
            return 1.0
        near = min(self.levels, key=lambda p: _distance(p, plan))
        near_steps = self._excess(near) if near.k else DRAFT_STEPS
        share = self.growth(plan.k) / self.growth(near.k or 1)
        return 1 + max(near_steps * share, ROW_STEPS)

    def _excess(self, plan: Plan) -> float:
        """Return a plan's cost above a plain cycle's, in plain steps (the unit of cost); negative if it is cheaper.

        KeyError for a plan without a level.
        """
        return math.expm1(self.levels[plan] - self.levels[PLAIN])

    def reach(self, context: int) -> None:
        """Use the costs of the octave of a context, a number of positions, from now on.

        An octave that is reached for the first time starts with the costs used before, of little weight.
        """
        octave = (context // OCTAVE).bit_length()
        if octave == self.octave:
            return
        self.octaves[self.octave] = self.levels, self.weights
        if octave in self.octaves:
            (self.levels, self.weights), self._carried = self.octaves.pop(octave), set()
        else:
            self.levels, self._carried = dict(self.levels), {plan for plan in self.levels if plan.k}
            self.weights = {plan: min(weight, PRIOR_WEIGHT) for plan, weight in self.weights.items()}
        self.octave = octave

    def observe(self, plan: Plan, seconds: float | None, prefilled: int = 0, *, update: bool = True) -> float:
        """Add a measured cycle; return its plain steps, capped for slow outliers, or the estimate if seconds is None.

        prefilled: hidden rows that the drafter read first. update: whether the cycle changes the estimates; an
        outlier does so only if the plan's last cycle was one, too.
        """
        expected = self.steps(plan) + self.resume_steps(prefilled)
        if seconds is None:
            return expected
        pace = math.log(seconds / expected) - self.levels[PLAIN]
        if self.pace is None:
            self.pace = self.pace_at_plain = pace
        surprise = pace - self.pace
        outlier = {plan} if abs(surprise) > OUTLIER else set()
        if update and (not outlier or plan in self._outliers):
            self._update(plan, surprise, prefilled)
        self._outliers = self._outliers - {plan} | outlier
        steps = expected * math.exp(min(surprise, OUTLIER))
        self.excess += steps - expected if plan.k else 0.0
        return steps

    def refund(self, seconds: float | None) -> float:
        """Return the plain steps above the estimates, less ALLOWANCE, that drafts took while the machine was slow.

        seconds: of a plain step that ended now; None, not measured: 0 is returned. The steps are those since the last
        measured plain step, and 0 is returned if this one was not slower. One step may be disturbed, hence ALLOWANCE.
        """
        if seconds is None or self.pace is None:
            return 0.0
        slower = math.log(seconds) - self.levels[PLAIN] > self.pace_at_plain
        excess, self.excess, self.pace_at_plain = self.excess, 0.0, self.pace
        return max(excess - ALLOWANCE, 0.0) if slower else 0.0

    def _update(self, plan: Plan, surprise: float, prefilled: int) -> None:
        """Attribute the deviation `surprise` of a logarithm to pace and plan, after a pause also to resuming.

        To resuming alone if the plan is measured; a share of it otherwise. To the pace alone if it is below -OUTLIER.
        """
        assert self.pace is not None
        if surprise < -OUTLIER:  # the pace was measured during a disturbance
            self.pace += surprise
            return
        surprise, steps, resuming = min(surprise, OUTLIER), self.steps(plan), self.resume_steps(prefilled)
        share = 1.0 if prefilled and self.weights.get(plan, 0.0) >= 1 else resuming / (steps + resuming)
        if prefilled:
            missed, rows = share * (steps + resuming) * math.expm1(surprise), prefilled / RESUME_ROWS
            gain = 0.5 * missed / (1 + rows**2)
            self.resume = max(self.resume + gain, 0.0)
            self.row = max(self.row + gain * rows / RESUME_ROWS, ROW_STEPS / 10)
        self.weights = {p: DECAY * weight for p, weight in {plan: PRIOR_WEIGHT / DECAY, **self.weights}.items()}
        gain = 1 / (1 + self.weights[plan])
        self.weights[plan] += 1 - share
        before = steps - 1
        self.levels[plan] = math.log(steps) + self.levels[PLAIN] + (1 - share) * gain * surprise
        self._carried.discard(plan)
        if plan.k:
            self._carry((self._excess(plan) - before) / self.growth(plan.k))
        self.pace += (1 - share) * (1 - gain) * PACE_SHARE * surprise

    def _carry(self, change: float) -> None:
        """Change the costs of plans that are not measured at this context, by `change` per unit of growth."""
        for plan in self._carried:
            excess = max(self._excess(plan) + change * self.growth(plan.k), ROW_STEPS)
            self.levels[plan] = math.log1p(excess) + self.levels[PLAIN]
