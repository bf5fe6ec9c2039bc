"""Learn what cycles cost in plain steps, from their seconds, and hold what one text teaches the next.

The logarithm of a cycle's seconds is the machine's pace, which is a plain step's, plus the level of what it did.
Both follow what is measured: a level is a mean whose older cycles fade, the pace takes a share of each surprise. What
was never measured lies straight between, or beyond, what was. Idle heads pay for waking, and for each row.
"""

import copy
import math

from .plan import PLAIN, Plan

LOST = 3.0  # plain steps that drafting may lose at once
SLOPE, ROW = 0.25, 0.01  # plain steps of a draft, and of a row that idle heads read, until one is measured
FEW = 10  # rows that cost as much as waking until it is measured; readings of more tell most of a row
KEPT = 0.985  # of the weight of what was measured or counted, what each cycle leaves
PACE = 0.15  # of a surprise, the share that is the machine's
GUESSED = 0.5  # cycles, the most that a cost rests on which is only a guess
FAR = 1.0  # of a logarithm, from which on a cycle was too slow by accident: a pause, a kernel that is compiled


class Costs:
    """Costs of plans, right drafts, and what drafting may still lose: all that goes on from text to text."""

    def __init__(self):
        self.levels = {PLAIN: 0.0}  # logarithms of plain steps
        self.weights = {PLAIN: 0.0}  # cycles that each rests on
        self.pace: float | None = None  # logarithm of seconds; None: nothing was measured here
        self.plain_pace: float | None = None  # as the last plain step left it
        self.drafted = 0.0, 0.0  # plain steps that cycles with drafts took since that step, and that were expected
        self.unsure = 3  # plain steps that come first: beside them all is judged
        self.wake, self.row = FEW * ROW, ROW  # plain steps of idle heads' waking, and per row that they then read
        self.counts: dict[str, list[list[float]]] = {}  # per kind of drafts and depth: right ones, and all
        self.budget = LOST  # plain steps that drafting may lose
        self.elapsed = 0.0  # plain steps
        self.again: dict[str, float] = {}  # per kind of drafts that do not seem to pay, when they are tried again
        self._odd: Plan | str | None = None  # what the last cycle did, if its seconds were not to be believed

    def as_guess(self) -> "Costs":
        """Copy them for cycles that are like these but cost otherwise, as of another number of texts at once."""
        guess, known = Costs(), copy.deepcopy(self)
        guess.levels, guess.wake, guess.row, guess.counts = known.levels, known.wake, known.row, known.counts
        guess.weights = {plan: min(GUESSED, weight) for plan, weight in known.weights.items()}
        return guess

    @property
    def seconds(self) -> float:
        """Estimate a plain step's."""
        return math.exp(self.levels[PLAIN] + (self.pace or 0.0))

    def reading(self, rows: int) -> float:
        """Estimate the plain steps in which idle heads wake up and read what they have missed."""
        return self.wake + self.row * rows if rows else 0.0

    def steps(self, plan: Plan) -> float:
        """Estimate what a cycle costs in plain steps; drafts are never free."""
        if plan in self.levels:
            return max(math.exp(self.levels[plan] - self.levels[PLAIN]), 1 + ROW) if plan.k else 1.0
        known = [p for p in self.levels if p.k]
        own = [p for p in known if p.source == plan.source] or known
        points = [(0, 1.0), *sorted((p.k, self.steps(p)) for p in own)]
        k, steps = max(point for point in points if point[0] <= plan.k)
        other = min((point for point in points if point[0] > plan.k), default=points[0])
        slope = (other[1] - steps) / (other[0] - k) if other[0] != k else SLOPE
        return max(steps + slope * (plan.k - k), 1 + ROW)

    def observe(self, plan: Plan, seconds: float, caught_up: int = 0) -> float:
        """Learn from one cycle, in which idle heads read `caught_up` rows; return its plain steps, no accidents."""
        expected = self.steps(plan) + self.reading(caught_up)
        took = math.log(seconds / expected) - self.levels[PLAIN]
        self.pace = took if self.pace is None else self.pace
        surprise = took - self.pace
        odd = None if abs(surprise) < FAR else plan if surprise > 0 else "too fast"
        if odd in (None, self._odd):
            self._learn(plan, surprise, caught_up)
        if odd or self._odd in (plan, "too fast"):
            self._odd = odd
        return expected * math.exp(min(surprise, FAR))

    def not_lost(self, seconds: float | None) -> float:
        """Return what drafting since the last plain step seemed to lose, if this one tells of a slower machine.

        In plain steps, and only what is more than may be lost at once: a plain step, too, may be slow by accident.
        """
        if seconds is None or self.pace is None:
            return 0.0
        before = self.pace if self.plain_pace is None else self.plain_pace
        slower = seconds / math.exp(self.levels[PLAIN] + before)
        took, expected = self.drafted
        self.plain_pace, self.drafted = self.pace, (0.0, 0.0)
        return max(took - max(took / slower, expected) - LOST, 0.0)

    def _learn(self, plan: Plan, surprise: float, caught_up: int) -> None:
        """Lay a surprise on pace and plan; where heads woke up for a plan that is known, on their reading alone."""
        assert self.pace is not None
        if surprise < -FAR:  # the pace was a pause's
            self.pace += surprise
            return
        surprise, steps, reading = min(surprise, FAR), self.steps(plan), self.reading(caught_up)
        share = 1.0 if caught_up and self.weights.get(plan, 0.0) >= 1 else reading / (steps + reading)
        if caught_up:
            missed, rows = share * (steps + reading) * math.expm1(surprise), caught_up / FEW
            gain = 0.5 * missed / (1 + rows**2)
            self.wake, self.row = max(self.wake + gain, 0.0), max(self.row + gain * rows / FEW, ROW / 10)
        self.weights = {p: KEPT * weight for p, weight in {plan: 0.5 / KEPT, **self.weights}.items()}
        gain = 1 / (1 + self.weights[plan]) if len(self.weights) > 1 else 0.0
        self.weights[plan] += 1 - share
        self.levels[plan] = math.log(steps) + self.levels[PLAIN] + (1 - share) * gain * surprise
        self.pace += (1 - share) * (1 - gain) * PACE * surprise
