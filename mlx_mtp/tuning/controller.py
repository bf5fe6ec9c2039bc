"""Choose how many drafts each cycle verifies: as many, or none, as promise the most tokens per second.

Costs are measured (`Costs`) and right drafts are counted; what was measured seldom or long ago is thought better than
it was. A budget bounds what drafting may lose against plain decoding: it grows a little with every step and by what
drafts win, up to four times what may be lost at once, and goes on from text to text. Costs are in plain steps: the
time of one cycle without drafts is one.
"""

import copy
import math
from itertools import chain, islice, repeat, zip_longest

from .costs import GUESSED, KEPT, LOST, Costs
from .plan import PLAIN, SHORTEST, Choice, Cycle, Plan, ladder

SHARE = 0.013  # of a plain step, what each step adds to the budget
GUESS = 0.6  # the share of right drafts while none were seen
CURIOUS, DOUBT = 0.25, 0.7  # of its rate, by which a plan, and the plain step, is thought better while not measured


class Controller:
    """The choice of each cycle's plan; `plan` may be asked before the cycle before it was observed.

    max_drafts, max_lookup: the most drafts of `source` and of the text, 0 for none. p_min: whether reading the
    confidence of `source` may be tried. known: what earlier texts taught, which goes on to learn from this one.
    """

    def __init__(
        self,
        *,
        max_drafts: int,
        max_lookup: int = 0,
        p_min: bool = False,
        known: Costs | None = None,
        source: str = "heads",
    ):
        self.costs = copy.deepcopy(known) or Costs()
        self.source, self.heads = source, [Plan(source, k) for k in ladder(max_drafts)]
        self.lookups = [Plan("lookup", k) for k in sorted({3, 7, max_lookup}) if 0 < k <= max_lookup]
        self.confident = Plan(source, max_drafts, p_min=True) if p_min and max_drafts else None
        self.paused = ""  # why the last cycle that was planned does not draft; empty where it does, or measures
        self._began = False  # the first cycle is over, which is slow whatever it does
        self._risk = 0.0  # of the last cycle that was planned, which may not yet be observed

    def plan(self, matched: int = 0, behind: int = 0) -> Plan:
        """Choose the next cycle's plan.

        matched: last tokens that have occurred before in the same order. behind: rows that idle heads have to read.
        """
        costs, spare = self.costs, self.costs.budget - self._risk
        best = plain = Choice(PLAIN, 1.0, 1.0)
        if not costs.unsure and (choices := self._choices(matched, behind)):
            best = max((plain, *(c for c in choices if c.risk <= spare)), key=self._score)
            hope = max(choices, key=lambda c: c.rate)
            kind = hope.plan.kind(matched)
            if hope.rate < 1 and hope.risk <= spare and costs.again.get(kind, 0.0) <= costs.elapsed:
                best = hope
                costs.again[kind] = costs.elapsed + (hope.risk + 1 - hope.tokens) / SHARE
            lost = f"lost {LOST - costs.budget:.1f} plain steps" if hope.risk > spare else ""
            self.paused = "" if best is not plain else str(hope) if hope.rate < 1 else lost
        costs.unsure = max(0, costs.unsure - 1)
        self._risk = best.risk
        return best.plan

    def observe(self, cycle: Cycle) -> None:
        """Learn from a cycle."""
        costs, plan = self.costs, cycle.plan
        did = Plan(plan.source, cycle.verified) if cycle.verified else PLAIN
        seconds = cycle.seconds if self._began or cycle.caught_up or costs.pace is None else None
        self._began = True
        steps = costs.observe(did, seconds, cycle.caught_up, learn=not plan.p_min)
        won = cycle.accepted + 1 - steps if plan.k else costs.not_lost(seconds)
        costs.budget = min(costs.budget + SHARE * steps + won, 4 * LOST)
        costs.elapsed += steps
        if plan.p_min:
            costs.weights[plan] = costs.weights.get(plan, 0.0) + 1
            self._count(plan.kind(0), (cycle.accepted + 1.0, steps))
        elif plan.k:
            reached = range(int(min(cycle.accepted + 1, cycle.verified)))
            depths = cycle.depths or [(float(depth < cycle.accepted), 1.0) for depth in reached]
            self._count(plan.kind(cycle.matched), *depths)

    def _score(self, choice: Choice) -> float:
        much = CURIOUS if choice.plan.k and not choice.plan.p_min else DOUBT
        return choice.rate * (1 + much / math.sqrt(GUESSED + self.costs.weights.get(choice.plan, 0.0)))

    def _choices(self, matched: int, behind: int) -> list[Choice]:
        """List all that may be drafted now."""
        costs, rows = self.costs, self.costs.reading(behind)
        choices = self._expect(self.source, self.heads, rows)
        if self.confident:  # how far it goes differs from text to text: nothing tells its rate but itself
            like = max(choices, key=lambda c: c.rate)
            gave, took = costs.counts.get("confident", [[0.0, 0.0]])[0]
            rate = (GUESSED * like.tokens + gave) / (GUESSED * like.steps + took)
            choices.append(Choice(self.confident, rate * like.steps, like.steps, rows))
        most = max(1, 2 * max(p.k for p in costs.levels))  # no leap into the unknown
        choices = [c for c in choices if c.plan.k <= most or (c.plan.p_min and most > 2)]
        if matched >= SHORTEST and self.lookups:
            copied = self._expect(self.lookups[0].kind(matched), self.lookups)
            choices += [c for c in copied if c.plan.k <= max(3, most + 1)]  # 3, 7, 15: twice the rows
        return choices

    def _expect(self, kind: str, plans: list[Plan], rows: float = 0.0) -> list[Choice]:
        """Expect what plans give and take; a depth that was hardly seen is thought to be like the one before it."""
        counts, tokens, reached, p = self.costs.counts.get(kind, []), [1.0], 1.0, GUESS
        for right, seen in islice(chain(counts, repeat((0.0, 0.0))), plans[-1].k if plans else 0):
            p = (GUESSED * p + right) / (GUESSED + seen)
            reached *= p
            tokens.append(tokens[-1] + reached)
        return [Choice(plan, tokens[plan.k], self.costs.steps(plan), rows) for plan in plans]

    def _count(self, kind: str, *pairs: tuple[float, float]) -> None:
        """Count a cycle's drafts, those that were reached; older ones count less and less."""
        both = zip_longest(self.costs.counts.get(kind, []), pairs, fillvalue=(0.0, 0.0))
        self.costs.counts[kind] = [[KEPT * a + right, KEPT * b + seen] for (a, b), (right, seen) in both]
