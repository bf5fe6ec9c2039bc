"""Choose how many drafts each cycle verifies: as many, or none, as promise the most tokens per second.

Costs are measured (`Costs`), acceptance is counted and forgotten at a fixed rate (`Acceptance`). What is not known is
tried where it could be the best (upper confidence bounds), and two accounts bound what that may cost: one against
plain decoding, whatever drafts turn out to be worth, and one against the best draft length known.
Costs are in plain steps: the time of one cycle without drafts is one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from .costs import NOISE, PLAIN, Arm, Costs, Source

# Acceptance: what depth 1 is thought to be before it was seen, how many drafts that counts for, what a cycle forgets.
GUESS, WEIGHT, KEPT = 0.6, 2.0, 0.95
BEFORE = 16.0  # drafts that those of earlier runs count for
COST_OPTIMISM, OPTIMISM = 1.5, 0.8  # sds of costs and of acceptance by which an arm is judged above its mean
# Plain steps that drafting may have lost by now, and trying other arms too: at once, and per step of the run.
LOST, LOST_SHARE = 3.0, 0.012
MET = 8  # rows behind, up to which heads that come back go on with their stay
STAY_SHARE = 0.013  # plain steps that a stay with the heads may lose, per step since the last one began
SPIKE = 1.0  # plain steps that a cycle which is not believed is charged beyond what it was thought to take
TRIED, TRIED_SHARE = 2.0, 0.015
FIRST_TRY, SURE_FIRST_TRY = 8.0, 32.0  # plain steps; where earlier runs agree on the costs
PARKED, REST = 8, 3  # plain steps in a row after which only every fourth is thought about: that takes time, too
REFRESH = 8  # cycles after which the plain step may be measured again
UNLUCKY = 3.0  # sds by which the plain step may have been measured too slow
STAKE = 0.5  # of what may still be lost, the most that one cycle may put at risk
SCATTER = 0.4  # sd of the logarithm of a cycle's tokens
SHORTEST = 3  # tokens that must have occurred before
BUCKETS = (3, 5, 9, 17)  # lengths of match whose drafts are counted together: 3..4, 5..8, 9..16, 17..
STAY = 16  # cycles over which a catch-up of the heads is paid off


@dataclass(frozen=True)
class Plan:
    """The task of one cycle.

    source: who drafts, MTP heads or a lookup in the text. k: most drafts it verifies, 0 is a plain step. p_min: the
    heads' confidence is read first and only the leading drafts that pass are verified.
    """

    source: Literal["heads", "lookup"] = "heads"
    k: int = 0
    p_min: bool = False


@dataclass(frozen=True)
class Cycle:
    """The outcome of one cycle.

    verified: drafts verified, fewer than plan.k where p_min cut them, or near the end. accepted: how many were right.
    seconds: None if not measured. caught_up: rows that idle heads had to read before; its seconds hold that, too.
    matched: what `Controller.plan` was told.
    """

    plan: Plan
    verified: int
    accepted: int
    seconds: float | None
    caught_up: int = 0
    matched: int = 0


class Acceptance:
    """A decaying count, with a prior, of the drafts at each depth that were right where all before them were.

    A depth that was hardly seen is thought to be like the one before it. before: right ones and all, per depth, of
    earlier runs, which say where to begin.
    """

    def __init__(self, most: int, guess: float = GUESS, before: Sequence[Sequence[float]] = ()):
        self.guess = guess
        self.right, self.seen = [0.0] * most, [0.0] * most
        for depth, (right, seen) in enumerate(before[:most]):
            self.seen[depth] = min(seen, BEFORE)
            self.right[depth] = self.seen[depth] * right / seen if seen else 0.0

    def observe(self, verified: int, accepted: int) -> None:
        """Count a cycle's drafts."""
        for depth in range(min(accepted + 1, verified, len(self.seen))):
            self.seen[depth] += 1
            self.right[depth] += depth < accepted

    def forget(self, cycles: int = 1) -> None:
        self.right = [KEPT**cycles * n for n in self.right]
        self.seen = [KEPT**cycles * n for n in self.seen]

    def tokens(self, optimism: float = 0.0) -> list[float]:
        """Expect the tokens of a cycle of 0, 1, .. drafts, each depth taken `optimism` sds above its mean."""
        expected, reached, p = [1.0], 1.0, self.guess
        for right, seen in zip(self.right, self.seen, strict=True):
            p = (WEIGHT * p + right) / (WEIGHT + seen)
            high = p + optimism * math.sqrt(p * (1 - p) / (WEIGHT + seen + 1))
            reached *= min(1.0, high)
            expected.append(expected[-1] + reached)
        return expected


class Fixed:
    """The same plan for each cycle: k drafts, or max_lookup of the text where its last tokens occurred before."""

    def __init__(self, k: int, *, max_lookup: int = 0, p_min: bool = False):
        self.k, self.max_lookup, self.p_min = k, max_lookup, p_min

    def plan(self, matched: int = 0, behind: int = 0) -> Plan:
        if self.max_lookup and matched >= SHORTEST:
            return Plan("lookup", self.max_lookup)
        return Plan("heads", self.k, self.p_min and self.k > 0)

    def observe(self, cycle: Cycle) -> None:
        pass


class ScoredPlan(NamedTuple):
    """A plan with what is expected of it.

    steps: its cost in plain steps. rate: tokens per plain step; high: if all goes well. risk: plain steps that it may
    lose.
    """

    plan: Plan
    tokens: float
    steps: float
    rate: float
    high: float
    risk: float


class Controller:
    """The choice of each cycle's plan; `plan` may be asked before the cycle before it was observed.

    max_drafts, max_lookup: the most drafts of the heads and of the text, 0 for none. p_min: whether reading the
    heads' confidence may be tried. known: costs of earlier runs.
    """

    def __init__(self, *, max_drafts: int, max_lookup: int = 0, p_min: bool = False, known: Costs | None = None):
        self.costs = Costs(max_drafts, max_lookup, known)
        self.plans = {arm: Plan(*arm) for arm in self.costs.arms}
        self.heads = Acceptance(max_drafts, before=known.drafts if known else ())
        self.prompt = [Acceptance(max_lookup, guess=0.5 + 0.1 * i) for i in range(len(BUCKETS))]
        self.lost = 0.0  # plain steps that drafting took beyond its tokens' worth
        self.tried = 0.0  # plain steps that other arms than the best known took beyond their tokens' worth
        self.elapsed = 0.0  # plain steps
        # The heads' stay under way or last: when it began, what was lost then, and what it may lose.
        self.came_at = self.came_with = self.stake = 0.0
        self.pending = -1.0  # the most that the cycle not yet observed can lose
        self.best_rate = 1.0
        self.confident = Confident() if p_min and max_drafts else None
        self.explores: list[bool] = []
        # Elapsed steps at which one draft is tried whatever is thought of its cost.
        self.first_try = SURE_FIRST_TRY if self.costs.confirmed else FIRST_TRY
        self.since_plain = 0  # cycles since the last plain step
        self.parked = 0  # plain steps in a row that were the best known
        self.resting = 0  # of them those to come, before it is thought about again
        self.passed = 0  # cycles of which nothing was learned, and the one that is being observed

    def plan(self, matched: int = 0, behind: int = 0) -> Plan:
        """Choose the next cycle's plan.

        matched: how many of the last tokens have occurred before in the same order. behind: rows that idle heads
        would have to read first.
        """
        if self.resting and matched < SHORTEST:
            self.resting -= 1
            self.explores.append(False)
            return self.plans[PLAIN]
        choices = self._choices(matched, behind)
        plain = choices[0]
        if self.costs.unknown and self.pending != 0:  # without the plain step nothing can be judged
            return self._take(plain, explores=False, behind=behind)
        spare = LOST + LOST_SHARE * self.elapsed - self.lost - max(self.pending, 0.0)
        # One draft of the heads, unseen in this run: what a file says of it may be wrong.
        unseen = not self.costs.seen[self.costs.index.get(("heads", 1), 0)]
        first = next((c for c in choices if unseen and c.plan == Plan("heads", 1)), None)
        if first and self.elapsed >= self.first_try and spare >= LOST / 2 + self.costs.row * behind:
            self.first_try *= 2
            return self._take(first, explores=True, behind=behind)
        stay = max(spare, self._stay(behind) - max(self.pending, 0.0))
        choices = [c for c in choices if c is plain or c.risk <= (stay if c.plan.source == "heads" else spare)]
        best = max(choices, key=lambda c: c.rate)
        self.best_rate = best.rate
        spare = TRIED + TRIED_SHARE * self.elapsed - self.tried
        stale = self.since_plain >= REFRESH
        hopeful = max((c for c in choices if c is not plain or c is best), key=lambda c: c.high)
        if stale and best is not plain and self._plain_may_be_best(best):
            hopeful = plain
        if hopeful is not best and hopeful.steps - hopeful.tokens / best.rate <= spare:
            return self._take(hopeful, explores=True, behind=behind)
        return self._take(best, explores=False, behind=behind)

    def observe(self, cycle: Cycle) -> None:
        """Learn from a cycle."""
        self.passed += 1
        if self.resting and not cycle.plan.k:
            self.elapsed += 1
            self.explores.pop(0)
            return
        arm: Arm = (cycle.plan.source, cycle.verified) if cycle.verified else PLAIN
        before = self.costs.mean[0]
        believed = False
        if cycle.seconds is not None and arm in self.costs.index and not cycle.plan.p_min:
            believed = self.costs.observe(arm, cycle.seconds, cycle.caught_up)
        self.costs.drift(self.passed)
        shift = self.costs.mean[0] - before
        if abs(shift) > 1:  # all was measured in wrong units
            self.elapsed *= math.exp(-shift)
            self.came_at *= math.exp(-shift)
        steps = self.costs.steps(arm)
        if cycle.seconds is not None:
            took = steps * cycle.seconds / self.costs.seconds(arm)
            steps = took if believed or cycle.plan.p_min else min(took, steps + SPIKE)
        self._account(cycle, steps)
        if cycle.plan.p_min and self.confident:
            self.confident.observe(cycle, steps)
        elif cycle.plan.source == "lookup":
            self._bucket(cycle.matched).observe(cycle.verified, cycle.accepted)
        else:
            self.heads.observe(cycle.verified, cycle.accepted)
            self.costs.drafted(cycle.verified, cycle.accepted)
        self.heads.forget(self.passed)
        if self.confident:
            self.confident.forget(self.passed)
        self.passed = 0

    def _plain_may_be_best(self, best: ScoredPlan) -> bool:
        """Tell whether the plain step may be best: only another one tells that it was unlucky when measured."""
        arm = (best.plan.source, best.plan.k)
        return math.log(best.rate) < UNLUCKY * self.costs.spread(arm, PLAIN)

    def _deeper(self, choices: list[ScoredPlan]) -> ScoredPlan:
        """Take one length above the heads' best: drafts that may stop early are to be compared with that."""
        heads = [c for c in choices if c.plan.source == "heads" and c.plan.k]
        best = max(range(len(heads)), key=lambda i: heads[i].rate)
        return heads[min(best + 1, len(heads) - 1)]

    def _account(self, cycle: Cycle, steps: float) -> None:
        self.elapsed += steps
        tokens = cycle.accepted + 1
        if cycle.plan.k:
            self.lost += steps - tokens
        if self.explores and self.explores.pop(0):
            self.tried += max(0.0, steps - tokens / self.best_rate)

    def _stay(self, behind: int) -> float:
        """Allow steps to a stay with the heads that goes on, or begins now, however much was lost before.

        Parked, the price of coming back rises with every row; what it may cost rises with them.
        """
        if behind > MET:
            return STAY_SHARE * (self.elapsed - self.came_at)
        return self.stake - (self.lost - self.came_with)

    def _take(self, choice: ScoredPlan, *, explores: bool, behind: int = 0) -> Plan:
        if behind > MET and choice.plan.k and choice.plan.source == "heads":
            self.stake = self._stay(behind)
            self.came_at, self.came_with = self.elapsed, self.lost
        self.pending = choice.risk if choice.plan.k else 0.0
        self.explores.append(explores)
        self.since_plain = 0 if not choice.plan.k else self.since_plain + 1
        self.parked = 0 if choice.plan.k or explores else self.parked + 1
        if self.parked >= PARKED:
            self.resting = REST
        return choice.plan

    def _bucket(self, matched: int) -> Acceptance:
        return self.prompt[max(sum(matched >= least for least in BUCKETS) - 1, 0)]

    def _choices(self, matched: int, behind: int) -> list[ScoredPlan]:
        """Score every arm that may run now, the plain step first."""
        choices = self._choices_of("heads", self.heads, behind)
        if matched >= SHORTEST:
            choices += self._choices_of("lookup", self._bucket(matched), 0)
        if self.confident:
            choices.append(self.confident.choice(self._deeper(choices)))
        return choices

    def _choices_of(self, source: Source, acceptance: Acceptance, behind: int) -> list[ScoredPlan]:
        """Score the arms of one who drafts, ascending; the plain step is among the heads'."""
        costs, choices = self.costs, []
        tokens, high = acceptance.tokens(), acceptance.tokens(OPTIMISM)
        shortest = True
        for arm, plan in self.plans.items():
            if arm[0] != source:
                continue
            k, steps = plan.k, costs.steps(arm)
            rate = high[k] / steps * math.exp(COST_OPTIMISM * costs.doubt(arm))
            first = shortest or not k
            new = first and not costs.seen[costs.index[arm]]
            risk = (steps * (1 if first else math.exp(costs.spread(arm, PLAIN))) - 1) / (1 if new else STAKE)
            shortest = not k
            if source == "heads" and k and behind:
                steps += costs.row * behind / STAY
                risk += costs.row * behind
            choices.append(ScoredPlan(plan, tokens[k], steps, tokens[k] / steps, rate, risk))
        return choices


class Confident:
    """The arm that reads the heads' confidence, with decaying counts of what its cycles gave and took.

    How far the heads draft before they stop differs from text to text, so that nothing tells its rate but itself.
    """

    def __init__(self):
        self.cycles = self.tokens = self.steps = 0.0

    def observe(self, cycle: Cycle, steps: float) -> None:
        self.cycles, self.tokens, self.steps = self.cycles + 1, self.tokens + cycle.accepted + 1, self.steps + steps

    def forget(self, cycles: int) -> None:
        kept = KEPT**cycles
        self.cycles, self.tokens, self.steps = kept * self.cycles, kept * self.tokens, kept * self.steps

    def choice(self, like: ScoredPlan) -> ScoredPlan:
        """Score the arm beside a plan of as many drafts, whose rate it is thought to have until it was seen."""
        tokens = (self.tokens + WEIGHT * like.tokens) / (self.cycles + WEIGHT)
        steps = (self.steps + WEIGHT * like.steps) / (self.cycles + WEIGHT)
        doubt = math.sqrt(NOISE**2 + SCATTER**2) / math.sqrt(self.cycles + WEIGHT)
        plan = Plan("heads", like.plan.k, p_min=True)
        rate = tokens / steps
        return ScoredPlan(plan, tokens, steps, rate, rate * math.exp(COST_OPTIMISM * doubt), like.risk)
