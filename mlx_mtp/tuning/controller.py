"""Choose how many drafts each cycle verifies: as many, or none, as promise the most tokens per second.

Costs are measured (`Costs`) and right drafts are counted; what was measured seldom or long ago is thought better than
it was. A budget bounds what drafting may lose against plain decoding: it grows a little with every step and by what
drafts win, as far as it can hold, and goes on from text to text. Costs are in plain steps: the time of one cycle
without drafts is one.
"""

import copy
import math
from collections import deque

from .costs import FAR, KEPT, LOST, Costs
from .plan import PLAIN, SHORTEST, Choice, Cycle, Plan, ladder

SHARE = 0.012  # of a plain step, what each step adds to the budget
SAVED = 8.0  # plain steps of it, the most that a text begins with; within a text it holds twice as many
GUESS, WEIGHT = 0.6, 2.0  # the share of right drafts while none were seen, and as how many drafts that counts
CURIOUS, DOUBT = 0.3, 0.7  # of its rate, by which a plan, and the plain step, is thought better while not measured


class Controller:
    """The choice of each cycle's plan; `plan` may be asked before the cycle before it was observed.

    max_drafts, max_lookup: the most drafts of the heads and of the text, 0 for none. p_min: whether reading the
    heads' confidence may be tried. known: what earlier texts taught, which goes on to learn from this one.
    """

    def __init__(self, *, max_drafts: int, max_lookup: int = 0, p_min: bool = False, known: Costs | None = None):
        self.costs = copy.deepcopy(known) or Costs()
        self.costs.budget = min(self.costs.budget, SAVED)
        self.heads = [Plan("heads", k) for k in ladder(max_drafts)]
        self.lookups = [Plan("lookup", k) for k in ladder(max_lookup) if k in (3, 7) or k == max_lookup]
        self.confident = Plan("heads", max_drafts, p_min=True) if p_min and max_drafts else None
        self.paused = ""  # why the last cycle that was planned does not draft; empty where it does, or measures
        self._began = False  # the first cycle is over, which is slow whatever it does
        self._parked = 0  # plain steps in a row
        self._risks: deque[float] = deque()  # of the cycles that are not yet observed

    def plan(self, matched: int = 0, behind: int = 0) -> Plan:
        """Choose the next cycle's plan.

        matched: how many of the last tokens have occurred before in the same order. behind: rows that idle heads
        would have to read first.
        """
        plain, best = Choice(PLAIN, 1.0, 1.0), None
        rests = self._parked % 4 and self._parked > 8 and matched < SHORTEST  # a thought takes time, too
        choices = [] if rests else self._choices(matched, behind)
        if choices and self.costs.unsure <= len(self._risks):
            spare = self.costs.budget - sum(self._risks)
            hope = max(choices, key=lambda c: c.rate)
            best = max((plain, *(c for c in choices if c.risk <= spare)), key=self._score)
            kind, costs = hope.plan.kind(matched), self.costs
            if hope.rate < 1 and costs.again.get(kind, 0.0) <= costs.elapsed and hope.risk <= spare:
                best = hope
                costs.again[kind] = costs.elapsed + (hope.risk + 1 - hope.tokens) / SHARE
            self.paused = "" if best is not plain else self._reason(hope, spare)
        best = best or plain
        self._parked = 0 if best.plan.k else self._parked + 1
        self._risks.append(best.risk)
        return best.plan

    def observe(self, cycle: Cycle) -> None:
        """Learn from a cycle."""
        costs, plan = self.costs, cycle.plan
        if self._risks:
            self._risks.popleft()
        did = Plan(plan.source, cycle.verified) if cycle.verified else PLAIN
        steps = expected = costs.steps(did) + costs.reading(cycle.caught_up)
        seconds = cycle.seconds if self._began or cycle.caught_up or costs.pace is None else None
        self._began = True
        if seconds is not None and plan.p_min:
            steps = min(seconds / costs.seconds, math.exp(FAR) * steps)
        elif seconds is not None:
            steps = costs.observe(did, seconds, cycle.caught_up)
        won = cycle.accepted + 1 - steps if plan.k else costs.not_lost(seconds)
        costs.budget = min(costs.budget + SHARE * steps + won, 2 * SAVED)
        costs.elapsed += steps
        costs.unsure = max(0, costs.unsure - 1)
        kind = plan.kind(cycle.matched)
        if won > 0:  # or was not lost
            costs.again[kind] = costs.elapsed
        if plan.k:
            costs.drafted = costs.drafted[0] + steps, costs.drafted[1] + expected
        if plan.p_min:
            costs.weights[plan] = costs.weights.get(plan, 0.0) + 1
            self._count(kind, [(cycle.accepted + 1.0, steps)])
        elif plan.k:
            reached = int(min(cycle.accepted + 1, cycle.verified))
            one = [(float(depth < cycle.accepted), 1.0) for depth in range(reached)]
            self._count(kind, [*cycle.depths] or one)

    def _reason(self, hope: Choice, spare: float) -> str:
        if hope.rate < 1:
            return f"costs {hope.tokens / hope.rate:.1f} plain steps, gains {hope.tokens:.1f} tokens"
        return f"lost {LOST - self.costs.budget:.1f} plain steps" if hope.risk > spare else ""

    def _score(self, choice: Choice) -> float:
        weight, plan = self.costs.weights.get(choice.plan, 0.0), choice.plan
        known = plan.k and not plan.p_min
        return choice.rate * (1 + (CURIOUS / math.sqrt(1 + weight) if known else DOUBT / math.sqrt(0.1 + weight)))

    def _choices(self, matched: int, behind: int) -> list[Choice]:
        """List all that may be drafted now."""
        costs, rows = self.costs, self.costs.reading(behind)
        tokens = self._tokens("heads", self.heads)
        choices = [Choice(p, n, costs.steps(p), rows) for p, n in zip(self.heads, tokens, strict=True)]
        if self.confident:  # how far it goes differs from text to text: nothing tells its rate but itself
            like = max(choices, key=lambda c: c.rate)
            gave, took = costs.counts.get("confident", [[0.0, 0.0]])[0]
            rate = (WEIGHT * like.tokens + gave) / (WEIGHT * like.steps + took)
            choices.append(Choice(self.confident, rate * like.steps, like.steps, rows))
        if matched >= SHORTEST and self.lookups:
            tokens = self._tokens(self.lookups[0].kind(matched), self.lookups)
            choices += [Choice(p, n, costs.steps(p)) for p, n in zip(self.lookups, tokens, strict=True)]
        most = max(1, 2 * max(p.k for p in costs.levels))  # no leap into the unknown
        return [c for c in choices if c.plan.k <= most or (c.plan.p_min and most > 2) or c.plan in self.lookups[:1]]

    def _tokens(self, kind: str, plans: list[Plan]) -> list[float]:
        """Expect the tokens that plans give; a depth that was hardly seen is thought to be like the one before it."""
        counts, expected, reached, p = self.costs.counts.get(kind, []), [1.0], 1.0, GUESS
        for depth in range(plans[-1].k if plans else 0):
            right, seen = counts[depth] if depth < len(counts) else (0.0, 0.0)
            p = (WEIGHT * p + right) / (WEIGHT + seen)
            reached *= p
            expected.append(expected[-1] + reached)
        return [expected[plan.k] for plan in plans]

    def _count(self, kind: str, pairs: list[tuple[float, float]]) -> None:
        """Count a cycle's drafts, those that were reached; older ones count less and less."""
        counts = self.costs.counts.setdefault(kind, [])
        counts += [[0.0, 0.0] for _ in pairs[len(counts) :]]
        for i, pair in enumerate(counts):
            right, seen = pairs[i] if i < len(pairs) else (0.0, 0.0)
            pair[:] = KEPT * pair[0] + right, KEPT * pair[1] + seen
