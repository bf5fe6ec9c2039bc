"""How many drafts each cycle verifies: the number whose expected tokens per second are most, zero included.

Costs are measured (`Costs`), acceptance is counted and forgotten at a fixed rate (`Acceptance`). What is not known is
tried where it could be the best (upper confidence bounds), and two accounts bound what that may cost: one against
plain decoding, whatever drafts turn out to be worth, and one against the best draft length known.
"""

import math
from dataclasses import dataclass
from typing import Literal

from .costs import NOISE, PLAIN, Arm, Costs, Source

# Acceptance: what depth 1 is thought to be before it was seen, how many drafts that counts for, what a cycle forgets.
GUESS, WEIGHT, KEPT = 0.6, 2.0, 0.95
KEPT_BY = 0.9, 0.985  # the same of the short and the long memory
CHANGED, ODDS_KEPT = 3.0, 0.95  # log odds at which the long memory is given up
COST_OPTIMISM, OPTIMISM = 1.5, 0.8  # sds of costs and of acceptance by which an arm is judged above its mean
# Plain steps that drafting may have lost by now, and trying other arms too: at once, and per step of the run.
LOST, LOST_SHARE = 3.0, 0.012
TRIED, TRIED_SHARE = 2.0, 0.015
HORIZON = 20.0, 100.0
FIRST_TRY = 2.0  # plain steps
REFRESH = 8  # cycles after which the plain step may be measured again
STAKE = 1.0  # of what may still be lost, the most that one cycle may put at risk
SCATTER = 0.4  # sd of the logarithm of a cycle's tokens
SHORTEST = 3  # tokens that must have occurred before
BUCKETS = (3, 5, 9, 17)  # lengths of match whose drafts are counted together: 3..4, 5..8, 9..16, 17..
RETURN_SHARE, RUN = 0.022, 200.0
STAY = 16  # cycles over which a catch-up of the heads is paid off


@dataclass(frozen=True)
class Plan:
    """What one cycle does.

    source: who drafts. k: most drafts it verifies, 0 is a plain step. p_min: the heads' confidence is read first and
    only the leading drafts that pass are verified.
    """

    source: Literal["heads", "lookup"] = "heads"
    k: int = 0
    p_min: bool = False


@dataclass(frozen=True)
class Cycle:
    """What a cycle did.

    verified: drafts verified, fewer than plan.k where p_min cut them, or near the end. accepted: how many were right.
    seconds: None if not measured. caught_up: rows that idle heads had to read before; its seconds hold that too.
    matched: what `Controller.plan` was told.
    """

    plan: Plan
    verified: int
    accepted: int
    seconds: float | None
    caught_up: int = 0
    matched: int = 0


class Memory:
    """Of the drafts at each depth whose predecessors were right, how many were: a decaying count with a prior.

    A depth that was hardly seen is thought to be like the one before it. kept: what a cycle leaves of the counts.
    """

    def __init__(self, most: int, guess: float, kept: float):
        self.guess, self.kept = guess, kept
        self.right, self.seen = [0.0] * most, [0.0] * most

    def observe(self, verified: int, accepted: int) -> float:
        """The logarithm of how likely this was thought to be."""
        p, likelihood = self.guess, 0.0
        for depth in range(min(accepted + 1, verified, len(self.seen))):
            p = (WEIGHT * p + self.right[depth]) / (WEIGHT + self.seen[depth])
            likelihood += math.log(p if depth < accepted else 1 - p)
            self.seen[depth] += 1
            self.right[depth] += depth < accepted
        return likelihood

    def forget(self) -> None:
        self.right = [self.kept * n for n in self.right]
        self.seen = [self.kept * n for n in self.seen]

    def rates(self) -> list[float]:
        """Per depth, the chance that a draft is right if those before it are."""
        rates, p = [], self.guess
        for right, seen in zip(self.right, self.seen, strict=True):
            p = (WEIGHT * p + right) / (WEIGHT + seen)
            rates.append(p)
        return rates


class Acceptance:
    """How many drafts are right, from a short and a long memory, each trusted as it has foretold lately.

    A steady text needs the long one: the short one's luck would move the choice. When texts change the long one is wrong.
    """

    def __init__(self, most: int, guess: float = GUESS):
        self.short, self.long = (Memory(most, guess, kept) for kept in KEPT_BY)
        self.odds = 0.0  # logarithm of how much better the short memory foretold

    def observe(self, verified: int, accepted: int) -> None:
        better = self.short.observe(verified, accepted) - self.long.observe(verified, accepted)
        self.odds += better
        if self.odds > CHANGED:
            self.long.right, self.long.seen = [*self.short.right], [*self.short.seen]
            self.odds = 0.0

    def forget(self) -> None:
        self.short.forget()
        self.long.forget()
        self.odds = max(ODDS_KEPT * self.odds, -CHANGED)

    def tokens(self, optimism: float = 0.0) -> list[float]:
        """Expected tokens of a cycle of 0, 1, .. drafts, each depth taken `optimism` sds above its mean."""
        share = 1 / (1 + math.exp(-self.odds))
        expected, reached = [1.0], 1.0
        for p, q, n, m in zip(self.short.rates(), self.long.rates(), self.short.seen, self.long.seen, strict=True):
            p = share * p + (1 - share) * q
            high = p + optimism * math.sqrt(p * (1 - p) / (WEIGHT + share * n + (1 - share) * m + 1))
            reached *= min(1.0, high)
            expected.append(expected[-1] + reached)
        return expected


class Fixed:
    """Always k drafts; the prompt's max_lookup wherever the last tokens occurred before."""

    def __init__(self, k: int, *, max_lookup: int = 0, p_min: bool = False):
        self.k, self.max_lookup, self.p_min = k, max_lookup, p_min

    def plan(self, matched: int = 0, behind: int = 0) -> Plan:
        if self.max_lookup and matched >= SHORTEST:
            return Plan("lookup", self.max_lookup)
        return Plan("heads", self.k, self.p_min and self.k > 0)

    def observe(self, cycle: Cycle) -> None:
        pass


@dataclass(frozen=True)
class Choice:
    """A plan with what is expected of it. steps: its cost in plain steps. high: tokens per step if all goes well."""

    plan: Plan
    tokens: float
    steps: float
    high: float
    risk: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.steps


class Controller:
    """Picks each cycle's plan; `plan` for a cycle may be asked before the cycle before it was observed.

    max_drafts, max_lookup: the most drafts of the heads and of the prompt, 0 for none. p_min: whether reading the
    heads' confidence may be tried. known: costs of earlier runs.
    """

    def __init__(self, *, max_drafts: int, max_lookup: int = 0, p_min: bool = False, known: Costs | None = None):
        self.costs = Costs(max_drafts, max_lookup, known)
        self.heads = Acceptance(max_drafts)
        self.prompt = [Acceptance(max_lookup, guess=0.5 + 0.1 * i) for i in range(len(BUCKETS))]
        self.drafted, self.won = 0.0, 0  # plain steps that drafting took, the tokens that it gave
        self.tried = 0.0  # plain steps that other arms than the best known took beyond their tokens' worth
        self.elapsed = 0.0  # plain steps
        self.pending = -1.0  # the most that the cycle not yet observed can lose
        self.best_rate = 1.0
        self.confident = Confident() if p_min and max_drafts else None
        self.explores: list[bool] = []
        self.first_try = FIRST_TRY  # elapsed steps at which one draft is tried whatever is thought of its cost
        self.since_plain = 0  # cycles since the last plain step

    @property
    def lost(self) -> float:
        """Plain steps that drafting took beyond its tokens' worth, as long as they are now thought to be."""
        return self.drafted - self.won

    def plan(self, matched: int = 0, behind: int = 0) -> Plan:
        """The next cycle's plan.

        matched: how many of the last tokens have occurred before in the same order. behind: rows that idle heads
        would have to read first.
        """
        choices = self._choices(matched, behind)
        plain = choices[0]
        if not self.costs.seen[0] and self.pending != 0:  # without the plain step nothing can be judged
            return self._take(plain, explores=False)
        spare = LOST + LOST_SHARE * self.elapsed - self.lost - max(self.pending, 0.0)
        first = next((c for c in choices if self._never_measured(c)), None)
        if first and self.elapsed >= self.first_try and spare >= LOST:
            self.first_try *= 4
            return self._take(first, explores=True)
        if behind:  # the guarantee is for runs: what is paid for a return may have to come back later in this one
            spare = max(spare, RETURN_SHARE * max(self.elapsed, RUN) - self.lost - max(self.pending, 0.0))
        choices = [c for c in choices if c is plain or c.risk <= spare]
        best = max(choices, key=lambda c: c.rate)
        self.best_rate = best.rate
        spare = TRIED + TRIED_SHARE * self.elapsed - self.tried
        price = 1 - 1 / best.rate  # of a plain step, which everything is measured against
        stale = self.since_plain >= REFRESH and self.since_plain * TRIED_SHARE / 2 >= price
        hopeful = plain if stale else max(choices, key=lambda c: self._worth(c, best))
        if hopeful is not best and hopeful.steps - hopeful.tokens / best.rate <= spare:
            return self._take(hopeful, explores=True)
        return self._take(best, explores=False)

    def _worth(self, choice: Choice, best: Choice) -> float:
        """Plain steps that trying a choice once is expected to save, for what it teaches, less what it takes.

        The knowledge gradient (Frazier, Powell and Dayanik 2008) over a horizon, in logarithms of rates.
        """
        if choice is best:
            return 0.0
        sd = math.sqrt(self._news(choice, best))
        behind = math.log(best.rate / choice.rate)
        z = behind / sd
        if z > 4:
            return -1.0
        gain = sd * math.exp(-z * z / 2) / math.sqrt(2 * math.pi) - behind * math.erfc(z / math.sqrt(2)) / 2
        horizon = min(max(self.elapsed, HORIZON[0]), HORIZON[1])
        return horizon * gain - (choice.steps - choice.tokens / best.rate)

    def _news(self, choice: Choice, best: Choice) -> float:
        """The variance that one try takes from the logarithm of a choice's rate over the best one's."""
        drafts = math.log(choice.high * choice.steps / choice.tokens)
        if choice.plan.p_min:
            return max(drafts / COST_OPTIMISM, 1e-3) ** 2
        if choice.plan.source == best.plan.source:
            drafts -= math.log(best.high * best.steps / best.tokens)
        costs = self.costs.news((choice.plan.source, choice.plan.k), (best.plan.source, best.plan.k))
        return costs + max(drafts / OPTIMISM, 0.0) ** 2 / 2 + 1e-6

    def observe(self, cycle: Cycle) -> None:
        """Learn from a cycle."""
        arm = _arm(cycle)
        before, learned = self.costs.mean[0], self.costs.learning()
        believed = False
        if cycle.seconds is not None and arm in self.costs.index and not cycle.plan.p_min:
            believed = self.costs.observe(arm, cycle.seconds, cycle.caught_up)
        self.costs.drift()
        scale = math.exp(-learned * float(self.costs.mean[0] - before))
        self.elapsed, self.drafted = self.elapsed * scale, self.drafted * scale
        steps = self.costs.steps(arm)
        if cycle.seconds is not None and (believed or cycle.plan.p_min):
            steps *= cycle.seconds / self.costs.seconds(arm)
        self._account(cycle, steps)
        if cycle.plan.p_min and self.confident:
            self.confident.observe(cycle, steps)
            if cycle.seconds is not None and cycle.verified == cycle.plan.k and not cycle.caught_up:
                self.costs.observe_read(cycle.verified, cycle.seconds)
        elif cycle.plan.source == "lookup":
            self._bucket(cycle.matched).observe(cycle.verified, cycle.accepted)
        else:
            self.heads.observe(cycle.verified, cycle.accepted)
        self.heads.forget()
        if self.confident:
            self.confident.forget()

    def _never_measured(self, choice: Choice) -> bool:
        """One draft of the heads, of which this run knows nothing: what a file says may be wrong."""
        return choice.plan == Plan("heads", 1) and not self.costs.seen[self.costs.index["heads", 1]]

    def _deeper(self, choices: list[Choice]) -> Choice:
        """One length above the heads' best: what drafts that may stop early are to be compared with."""
        heads = [c for c in choices if c.plan.source == "heads" and c.plan.k]
        best = max(range(len(heads)), key=lambda i: heads[i].rate)
        return heads[min(best + 1, len(heads) - 1)]

    def _account(self, cycle: Cycle, steps: float) -> None:
        self.elapsed += steps
        tokens = cycle.accepted + 1
        if cycle.plan.k:
            self.drafted += steps
            self.won += tokens
        if self.explores and self.explores.pop(0):
            self.tried += max(0.0, steps - tokens / self.best_rate)

    def _take(self, choice: Choice, *, explores: bool) -> Plan:
        self.pending = choice.risk if choice.plan.k else 0.0
        self.explores.append(explores)
        self.since_plain = 0 if not choice.plan.k else self.since_plain + 1
        return choice.plan

    def _bucket(self, matched: int) -> Acceptance:
        return self.prompt[max(sum(matched >= least for least in BUCKETS) - 1, 0)]

    def _choices(self, matched: int, behind: int) -> list[Choice]:
        """Every arm that may run now, the plain step first."""
        expected, high = self.heads.tokens(), self.heads.tokens(OPTIMISM)
        means: dict[Arm, float] = {("heads", k): expected[k] for s, k in self.costs.arms if s == "heads"}
        highs: dict[Arm, float] = {("heads", k): high[k] for s, k in self.costs.arms if s == "heads"}
        if matched >= SHORTEST and any(s == "lookup" for s, _ in self.costs.arms):
            bucket = self._bucket(matched)
            expected, high = bucket.tokens(), bucket.tokens(OPTIMISM)
            means |= {("lookup", k): expected[k] for s, k in self.costs.arms if s == "lookup"}
            highs |= {("lookup", k): high[k] for s, k in self.costs.arms if s == "lookup"}
        choices = []
        for arm, tokens in means.items():
            source, k = arm
            steps = self.costs.steps(arm)
            shortest = k == min(n for s, n in self.costs.arms if (s == source and n) or not k)
            new = shortest and not self.costs.seen[self.costs.index[arm]]
            risk = (steps * math.exp(self.costs.spread(arm, PLAIN) * (not shortest)) - 1) / (1 if new else STAKE)
            if source == "heads" and k and behind:
                steps += self.costs.row * behind / STAY
                risk += self.costs.row * behind
            choices.append(Choice(Plan(source, k), tokens, steps, highs[arm] / steps, risk))
        if self.confident:
            choices.append(self.confident.choice(self._deeper(choices)))
        return choices


class Confident:
    """The arm that reads the heads' confidence: what its cycles gave and took, decaying counts.

    How far the heads draft before they stop differs from text to text, so that nothing tells its rate but itself.
    """

    def __init__(self):
        self.cycles = self.tokens = self.steps = 0.0

    def observe(self, cycle: Cycle, steps: float) -> None:
        self.cycles, self.tokens, self.steps = self.cycles + 1, self.tokens + cycle.accepted + 1, self.steps + steps

    def forget(self) -> None:
        self.cycles, self.tokens, self.steps = KEPT * self.cycles, KEPT * self.tokens, KEPT * self.steps

    def choice(self, like: Choice) -> Choice:
        """The arm beside a choice of as many drafts, whose rate it is thought to have until it was seen."""
        tokens = (self.tokens + WEIGHT * like.tokens) / (self.cycles + WEIGHT)
        steps = (self.steps + WEIGHT * like.steps) / (self.cycles + WEIGHT)
        doubt = math.sqrt(NOISE**2 + SCATTER**2) / math.sqrt(self.cycles + WEIGHT)
        plan = Plan("heads", like.plan.k, p_min=True)
        return Choice(plan, tokens, steps, tokens / steps * math.exp(COST_OPTIMISM * doubt), like.risk)


def _arm(cycle: Cycle) -> Arm:
    """The arm that a cycle's time belongs to."""
    source: Source = cycle.plan.source
    return (source, cycle.verified) if cycle.verified else PLAIN
