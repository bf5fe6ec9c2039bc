"""Choose the number of drafts of each cycle that maximises the estimated tokens per second.

The unit of cost is the plain step: the time of one cycle without drafts. Costs are measured (`Costs`) and accepted
drafts are counted; the rate of a plan with few or old measurements gets a bonus. A budget bounds what drafting may
lose against plain decoding. It grows with every step and with what drafts gain, and carries over between sequences.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest
from operator import mul
from types import MappingProxyType

from .costs import (
    ALLOWANCE,
    DECAY,
    PRIOR_ACCEPTANCE,
    PRIOR_WEIGHT,
    Costs,
    Growth,
    accepted_shares,
    dense,
)
from .plan import NAMES, PLAIN, SHORTEST, Cycle, Plan, PlanEstimate, Role, ladder, tree_ladder
from .tree_counts import calibrations, ranks, tree_chances

EARNED = 0.013  # plain steps that each plain step adds to the budget
PRIOR_FORCED = 0.95  # the same of a grammar's drafts
UNLIKELY, FORGET = 0.01, 0.3  # probability of misses that show a change, and the factor of the counts before them
PLAIN_STEP = PlanEstimate(PLAIN, 1.0, 1.0)
DRAFT_BONUS, PLAIN_BONUS = 0.25, 0.7  # shares of the rate that are added without measurements


class Controller:
    """Plans each cycle from the observed ones; `plan` may be called before the previous cycle is observed.

    max_drafts, max_lookup: maximum drafts of the model's drafter and of prompt lookup, 0 for none. others: those of
    other names of the same drafter, which must read the same pending rows first. p_min: whether to try plans that
    read the drafter's confidence. trees: by source the maximum drafts of a tree, for sources that have such plans.
    masked: whether to try plans that mask all drafts by a grammar. known: costs measured in earlier sequences; they
    are copied. names: the drafters' names in plans. growth: how the cost of a cycle grows with its drafts, for
    lengths that were not measured. rereads: after a rejected draft the accepted rows are read again, at the cost of
    reading all rows.
    """

    def __init__(
        self,
        *,
        max_drafts: int,
        max_lookup: int = 0,
        p_min: bool = False,
        trees: Mapping[str, int] = MappingProxyType({}),
        masked: bool = False,
        known: Costs | None = None,
        names: Mapping[Role, str] = MappingProxyType(NAMES),
        others: Mapping[str, int] = MappingProxyType({}),
        growth: Growth = dense,
        rereads: bool = False,
    ):
        self.costs = copy.deepcopy(known) or Costs()
        self.costs.growth, self.rereads = growth, rereads
        self.names, source = names, names[Role.MODEL]
        most = {source: max_drafts, **others}
        self.own = {name: [Plan(name, k) for k in ladder(longest)] for name, longest in most.items() if longest}
        self.stepwise = [Plan(source, k, stepwise=True) for k in ladder(max_drafts) if k > 1 and masked]
        self.trees = {
            name: [Plan(name, k, tree=True) for k in tree_ladder(longest)]
            for name, longest in trees.items()
            if longest > 1 and (max_lookup or name != names[Role.COPY])
        }
        self.kinds = {*self.own, *(Plan(name, tree=True).kind for name in self.trees.keys() & self.own.keys())}
        self.room = 15  # maximum drafts of a tree by the memory of its copies of caches, which the decode loop sets
        self._best_of_trees: tuple[PlanEstimate, PlanEstimate] | None = None  # the best one, and the best other plan
        self.lookups = [Plan(names[Role.COPY], k) for k in sorted({3, 7, max_lookup}) if 0 < k <= max_lookup]
        self.confident = {name: Plan(name, plans[-1].k, p_min=True) for name, plans in self.own.items() if p_min}
        self.paused = ""  # why the last planned cycle does not draft; empty if it drafts, cannot draft or measures
        self._began = False  # whether the first cycle has finished, which is always slow
        self._risk = 0.0  # of the last planned cycle, which may not be observed yet
        self._spare = 0.0  # of the budget when it was planned
        self._missed: dict[str, int] = {}  # by kind: the last cycles in a row that accepted none of these drafts
        self._kind, self._measures = "", False  # of its drafts; whether it is a plain step that measures

    def plan(self, matched: int = 0, pending: int = 0) -> Plan:
        """Return the next cycle's plan; 0 drafts if none can be made, if they do not pay, or without budget.

        `paused` becomes the reason in the last two cases. It becomes "" for a plan with drafts, if no drafts can be
        made, and for a plain step that is measured although drafts seem to pay, such as all while `costs.plain_first`
        is above 0.
        matched: length of the longest suffix that occurs earlier in the sequence. pending: hidden rows that the
        drafter must read before it drafts.
        """
        costs, spare = self.costs, self.costs.budget - self._risk
        self._spare, self._measures = spare, costs.plain_first > 0
        best = plain = PLAIN_STEP
        self.paused, self._best_of_trees = "", None
        if not costs.plain_first and (choices := self._choices(matched, pending)):
            best = max((plain, *(c for c in choices if c.risk <= spare)), key=self._score)
            hope = max(choices, key=lambda c: c.rate)
            if self.trees and (trees := [c for c in choices if c.plan.tree]):
                others = (c for c in choices if not c.plan.tree)
                self._best_of_trees = max(trees, key=lambda c: c.rate), max((plain, *others), key=lambda c: c.rate)
            kind = self.kind_of(hope.plan, matched)
            if hope.rate < 1 and hope.risk <= spare and costs.retry_at.get(kind, 0.0) <= costs.elapsed:
                best = hope
                costs.retry_at[kind] = costs.elapsed + (hope.risk + 1 - hope.tokens) / EARNED
            risky = self._why_risky(hope) if hope.risk > spare else ""
            self.paused = "" if best is not plain else str(hope) if hope.rate < 1 else risky
            best = self._retried(best, choices, spare)
        costs.plain_first = max(0, costs.plain_first - 1)
        self._risk, self._kind, self._planned = best.risk, self.kind_of(best.plan, matched), best
        return best.plan

    @property
    def trees_paused(self) -> str:
        """Why the last plan was not chosen among trees: none has the best rate; "" if one has, or without trees."""
        tree, other = self._best_of_trees or (PLAIN_STEP, PLAIN_STEP)
        if tree.rate >= other.rate or not any(plan.tree for plan in self.costs.levels):
            return ""
        return f"trees do not pay: one {tree}, other drafts gain {other.rate:.2f} tokens per step"

    def _why_risky(self, hope: PlanEstimate) -> str:
        """Return why a choice is not taken that may lose more plain steps than the budget."""
        lost = ALLOWANCE - self.costs.budget
        return f"lost {lost:.1f} plain steps" if lost >= 0.05 else f"may lose {hope.risk:.1f} plain steps in a cycle"

    def redraft(self, planned: Plan, forced: Sequence[int]) -> Plan:
        """Return `planned`, the plan of the next cycle, or one that verifies drafts that grammars force.

        It is called when the previous cycle has been read, and these drafts are known. forced: their number in each
        sequence; the drafter's plans verify them first. `paused` becomes "" for a plan with drafts.
        """
        if self._measures:
            return planned
        choices = [self._after_forced(Plan(self.names[Role.GRAMMAR], k), forced) for k in ladder(max(forced))]
        if trees := self.trees.get(self.names[Role.GRAMMAR]):
            choices += self._expect_trees(trees, 0, self._rates(self.names[Role.GRAMMAR], max(forced)))
        if planned.tree:
            now = self._planned._replace(plan=planned)
        else:
            now = self._after_forced(planned, forced) if planned.k else PLAIN_STEP
        best = max((now, *(c for c in choices if c.risk <= self._spare)), key=self._score)
        self._risk, self.paused = best.risk, "" if best.plan.k else self.paused
        return best.plan

    def observe(self, cycle: Cycle) -> None:
        """Update costs, acceptance counts and the budget from a finished cycle."""
        costs, plan = self.costs, cycle.plan
        costs.reach(cycle.context)
        did = replace(plan, k=cycle.verified, p_min=False) if cycle.verified else PLAIN
        seconds = cycle.seconds if self._began or cycle.prefilled or costs.pace is None else None
        self._began = True
        steps = costs.observe(did, seconds, cycle.prefilled, update=not plan.p_min)
        steps += costs.steps(did) if self.rereads and cycle.accepted < cycle.verified else 0.0
        won = cycle.accepted + 1 - steps if plan.k else costs.refund(seconds)
        costs.budget = min(costs.budget + EARNED * steps + won, 4 * ALLOWANCE)
        costs.elapsed += steps
        if plan.p_min:
            costs.weights[plan] = costs.weights.get(plan, 0.0) + 1
            self._count(plan.kind, (cycle.accepted + 1.0, steps))
        elif plan.tree:
            self._count_trees(cycle)
        elif plan.k:
            reached = range(int(min(cycle.accepted + 1, cycle.verified)))
            depths = cycle.depths or [(float(depth < cycle.accepted), 1.0) for depth in reached]
            self._count(self.kind_of(plan, cycle.matched), *depths)
            if any(seen for _, seen in cycle.forced):
                self._count(self.names[Role.GRAMMAR], *cycle.forced)
            if len(self.kinds) > 1 and plan.source in self.own and cycle.verified:
                self._compete(plan, *depths[0])

    def _count_trees(self, cycle: Cycle) -> None:
        """Count the nodes of a cycle's trees, if any sequence could accept them."""
        if not cycle.nodes:
            return
        plan, classes = cycle.plan, f"nodes of {cycle.plan.kind}"
        self._count(classes, *calibrations(cycle.nodes))
        self._count(self.kind_of(plan, cycle.matched), *ranks(cycle.nodes, self.costs.counts[classes]))
        if plan.source in self.own and not plan.stem:
            first = sum(any(node.kept for node in nodes) for nodes in cycle.nodes) / len(cycle.nodes)
            self._compete(plan, first, 1.0)

    def _compete(self, plan: Plan, right: float, seen: float) -> None:
        """Lower the weight of acceptance counts after a cycle with drafts of one of several own kinds.

        plan: of the cycle. Counts of the other kinds, sources and their trees, decay, so that these are tried again.
        Those of the plan's kind are reduced if its last cycles, in a row, did not accept the first own draft, and the
        counts make that less probable than UNLIKELY. right, seen: shares of the sequences whose first own draft was
        accepted, and of those where it could be: it could not after a wrong forced draft. With seen = 0 only the
        others' counts change.
        """
        for other in self.kinds - {plan.kind if plan.tree else plan.source}:
            self._count(other)
        if not seen:
            return
        kind = plan.kind
        counts, self._missed[kind] = self.costs.counts[kind], 0 if right else self._missed.get(kind, 0) + 1
        if self._missed[kind] and (1 - counts[0][0] / counts[0][1]) ** self._missed[kind] < UNLIKELY:
            for each in (kind, f"nodes of {kind}") if plan.tree else (kind,):
                self.costs.counts[each] = [[FORGET * a, FORGET * b] for a, b in self.costs.counts[each]]

    def kind_of(self, plan: Plan, matched: int) -> str:
        """Return the name under which acceptance of a plan's drafts is counted. matched: as in `plan`."""
        copied = plan.stem or plan.source == self.names[Role.COPY]
        return f"{plan.kind} {min(matched, 16).bit_length()}" if copied else plan.kind

    def _score(self, choice: PlanEstimate) -> float:
        bonus = DRAFT_BONUS if choice.plan.k and not choice.plan.p_min else PLAIN_BONUS
        return choice.rate * (1 + bonus / math.sqrt(PRIOR_WEIGHT + self.costs.weights.get(choice.plan, 0.0)))

    def _retried(self, best: PlanEstimate, choices: list[PlanEstimate], spare: float) -> PlanEstimate:
        """Return the longest choice of another own source than that of `best`, if its next trial is due; else `best`.

        Even if none of their drafts is accepted, trials take about EARNED of the time. There are none next to a
        plain step or a lookup, nor while `spare`, what is left of the budget, is below half of ALLOWANCE.
        """
        costs, sources = self.costs, self.own.keys() - {best.plan.source}
        others = [c for c in choices if c.plan.source in sources and not c.plan.tree and c.risk <= spare]
        if not best.plan.k or best.plan.source not in self.own or not others or spare < ALLOWANCE / 2:
            return best
        other = max(others, key=lambda c: (c.plan.k, c.rate))
        if costs.retry_at.get(kind := other.plan.kind, 0.0) > costs.elapsed:
            return best
        costs.retry_at[kind] = costs.elapsed + other.steps / EARNED
        return other

    def _choices(self, matched: int, pending: int) -> list[PlanEstimate]:
        """Return estimates of the plans with drafts that may be chosen now. matched, pending: as in `plan`.

        The drafter's plans have at most twice the drafts of the longest measured plan (at least 1). The limit is one
        higher, and at least 3, for prompt lookup; it ends for the plan with p_min once 2 drafts are measured.
        """
        costs, rows = self.costs, self.costs.resume_steps(pending)
        choices = self._expect("stepwise", self.stepwise, rows)
        for source, plans in self.own.items():
            choices += (own := self._expect(source, plans, rows))
            if sure := self.confident.get(source):  # its rate is measured as a whole: its length depends on the text
                like = max(own, key=lambda c: c.rate)
                gave, took = costs.counts.get(sure.kind, [[0.0, 0.0]])[0]
                rate = (PRIOR_WEIGHT * like.tokens + gave) / (PRIOR_WEIGHT * like.steps + took)
                choices.append(PlanEstimate(sure, rate * like.steps, like.steps, rows))
        longest = max(1, 2 * max(p.k for p in costs.levels))  # at most twice the longest measured plan
        choices = [c for c in choices if c.plan.k <= longest or (c.plan.p_min and longest > 2)]
        copied, rates = [], list[float]()
        if matched >= SHORTEST and self.lookups:
            kind = self.kind_of(self.lookups[0], matched)
            copied, rates = self._expect(kind, self.lookups), self._rates(kind, self.lookups[-1].k)
            copied += self._expect_trees(self.trees.get(self.names[Role.COPY], []), matched, rates)
        for source in self.trees.keys() & self.own.keys():
            own = self._rates(source, self.own[source][-1].k)
            copied += self._expect_trees(self.trees[source], matched, own, rows)
            if rates:
                stems = [replace(plan, stem=True) for plan in self.trees[source]]
                better = [max(pair) for pair in zip_longest(own, rates, fillvalue=0.0)]
                copied += self._expect_trees(stems, matched, better, rows)
        # 3, 7, 15: twice the rows
        return choices + [
            c for c in copied if c.plan.k <= max(3 if c.plan.source not in self.own else 0, longest + 1)
        ]

    def _expect(self, kind: str, plans: list[Plan], rows: float = 0.0) -> list[PlanEstimate]:
        """Return an estimate of the tokens and plain steps of each plan; plans: in ascending order of drafts.

        kind: of the acceptance counts; a depth without counts is accepted as often as the one before, the first one
        PRIOR_ACCEPTANCE of the times. rows: plain steps of resuming the drafter.
        """
        rates = self._rates(kind, plans[-1].k) if plans else []
        return [self._estimate(plan, rates[: plan.k], rows) for plan in plans]

    def _expect_trees(
        self, trees: list[Plan], matched: int, chain: list[float], rows: float = 0.0
    ) -> list[PlanEstimate]:
        """Return an estimate of each tree with room, as `_expect`. chain: shares of accepted drafts of chains."""
        fitting = [plan for plan in trees if plan.k <= self.room]
        if not fitting:
            return []
        counts = self.costs.counts.get(self.kind_of(trees[0], matched), [])
        reached = [*accumulate(tree_chances(counts, chain, trees[-1].k), initial=1.0)]
        return [PlanEstimate(plan, reached[plan.k], self.costs.steps(plan), rows) for plan in fitting]

    def _estimate(self, plan: Plan, rates: Sequence[float], rows: float = 0.0) -> PlanEstimate:
        """Return an estimate of a plan whose drafts are accepted at these rates."""
        reached, steps = [1.0, *accumulate(rates, mul)], self.costs.steps(plan)
        again = steps if self.rereads and plan.k else 0.0
        return PlanEstimate(plan, sum(reached), steps + again * (1 - reached[-1]), rows, again * reached[-1])

    def _after_forced(self, plan: Plan, forced: Sequence[int]) -> PlanEstimate:
        """Return an estimate of a plan in which each sequence's first drafts are those that its grammar forces.

        Its tokens are the mean of the sequences. A plan of the drafter has its own drafts after the forced ones, one
        of the grammar has none; one of a lookup has no forced drafts.
        """
        each = []
        for most in forced:
            first = 0 if plan.source == self.names[Role.COPY] else min(most, plan.k)
            rest = 0 if plan.source == self.names[Role.GRAMMAR] else plan.k - first
            rates = [*self._rates(self.names[Role.GRAMMAR], first), *self._rates(self._kind, rest)]
            each.append(self._estimate(plan, rates))
        tokens, steps, spared = (sum(e[i] for e in each) / len(each) for i in (1, 2, 4))
        return PlanEstimate(plan, tokens, steps, spared=spared)

    def _rates(self, kind: str, depths: int) -> list[float]:
        """Return the `accepted_shares` of a kind of drafts."""
        prior = PRIOR_FORCED if kind == self.names[Role.GRAMMAR] else PRIOR_ACCEPTANCE
        return accepted_shares(self.costs.counts.get(kind, []), depths, prior)

    def _count(self, kind: str, *pairs: tuple[float, float]) -> None:
        """Add (accepted, verified) per depth to the counts of a kind of drafts; older counts decay.

        For plans with p_min the only pair is (tokens, plain steps) of a cycle.
        """
        both = zip_longest(self.costs.counts.get(kind, []), pairs, fillvalue=(0.0, 0.0))
        self.costs.counts[kind] = [[DECAY * a + right, DECAY * b + seen] for (a, b), (right, seen) in both]
