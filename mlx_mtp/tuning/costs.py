"""Learn what cycles cost in plain steps, from their seconds, and hold what one text teaches the next.

The logarithm of a cycle's seconds is the machine's pace, which is a plain step's, plus the level of what it did.
Both follow what is measured: a level is a mean whose older cycles fade, the pace takes a share of each surprise. A
draft costs what one does in the nearest cycle that was measured. Idle heads pay for waking, and for each row.
"""

import math

from .plan import PLAIN, Plan

LOST = 3.0  # plain steps that drafting may lose at once
SLOPE, ROW = 0.25, 0.01  # plain steps of a draft, and of a row that idle heads read, until one is measured
FEW = 10  # rows that cost as much as waking until it is measured; readings of more tell most of a row
KEPT = 0.98  # of the weight of what was measured or counted, what each cycle leaves
PACE = 0.15  # of a surprise, the share that is the machine's
PRIOR_WEIGHT = 0.5  # as how many cycles, or drafts, a guess of their cost, or of how many are right, counts
FAR = 1.0  # of a logarithm, from which on a cycle was too slow by accident: a pause, a kernel that is compiled


class Costs:
    """Costs of plans, right drafts, and what drafting may still lose: all that goes on from text to text."""

    def __init__(self):
        self.levels = {PLAIN: 0.0}  # logarithms of plain steps
        self.weights = {PLAIN: 0.0}  # cycles that each rests on
        self.pace: float | None = None  # logarithm of seconds; None: nothing was measured here
        self.plain_pace = 0.0  # as the last plain step left it
        self.late = 0.0  # plain steps more than expected that cycles with drafts took since that step
        self.unsure = 3  # plain steps that come first: beside them all is judged
        self.wake, self.row = FEW * ROW, ROW  # plain steps of idle heads' waking, and per row that they then read
        self.counts: dict[str, list[list[float]]] = {}  # per kind of drafts and depth: right ones, and all
        self.budget = LOST  # plain steps that drafting may lose
        self.elapsed = 0.0  # plain steps
        self.again: dict[str, float] = {}  # per kind of drafts that do not seem to pay, when they are tried again
        self._odd: set[Plan] = set()  # whose last cycle was far from what was expected

    def reading(self, rows: int) -> float:
        """Estimate the plain steps in which idle heads wake up and read what they have missed."""
        return self.wake + self.row * rows if rows else 0.0

    def steps(self, plan: Plan) -> float:
        """Estimate what a cycle costs in plain steps; drafts are never free."""
        if not plan.k:
            return 1.0
        near = min(self.levels, key=lambda p: (not p.k, p.source != plan.source, abs(p.k - plan.k)))
        slope = math.expm1(self.levels[near] - self.levels[PLAIN]) / near.k if near.k else SLOPE
        return 1 + max(slope * plan.k, ROW)

    def observe(self, plan: Plan, seconds: float | None, prefilled: int = 0, *, learn: bool = True) -> float:
        """Learn from one cycle, in which idle heads read `prefilled` rows; return its plain steps, no accidents."""
        expected = self.steps(plan) + self.reading(prefilled)
        if seconds is None:
            return expected
        took = math.log(seconds / expected) - self.levels[PLAIN]
        if self.pace is None:
            self.pace = self.plain_pace = took
        surprise = took - self.pace
        odd = {plan} if abs(surprise) > FAR else set()
        if learn and (not odd or plan in self._odd):
            self._learn(plan, surprise, prefilled)
        self._odd = self._odd - {plan} | odd
        steps = expected * math.exp(min(surprise, FAR))
        self.late += steps - expected if plan.k else 0.0
        return steps

    def not_lost(self, seconds: float | None) -> float:
        """Return what drafting since the last plain step seemed to lose, if this one tells of a slower machine.

        In plain steps, and only what is more than may be lost at once: a plain step, too, may be slow by accident.
        """
        if seconds is None or self.pace is None:
            return 0.0
        slower = math.log(seconds) - self.levels[PLAIN] > self.plain_pace
        late, self.late, self.plain_pace = self.late, 0.0, self.pace
        return max(late - LOST, 0.0) if slower else 0.0

    def _learn(self, plan: Plan, surprise: float, prefilled: int) -> None:
        """Lay a surprise on pace and plan; where heads woke up for a plan that is known, on their reading alone."""
        assert self.pace is not None
        if surprise < -FAR:  # the pace was a pause's
            self.pace += surprise
            return
        surprise, steps, reading = min(surprise, FAR), self.steps(plan), self.reading(prefilled)
        share = 1.0 if prefilled and self.weights.get(plan, 0.0) >= 1 else reading / (steps + reading)
        if prefilled:
            missed, rows = share * (steps + reading) * math.expm1(surprise), prefilled / FEW
            gain = 0.5 * missed / (1 + rows**2)
            self.wake, self.row = max(self.wake + gain, 0.0), max(self.row + gain * rows / FEW, ROW / 10)
        self.weights = {p: KEPT * weight for p, weight in {plan: PRIOR_WEIGHT / KEPT, **self.weights}.items()}
        gain = 1 / (1 + self.weights[plan])
        self.weights[plan] += 1 - share
        self.levels[plan] = math.log(steps) + self.levels[PLAIN] + (1 - share) * gain * surprise
        self.pace += (1 - share) * (1 - gain) * PACE * surprise
