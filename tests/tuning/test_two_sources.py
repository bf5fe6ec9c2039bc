"""A controller with two sources uses the better one, follows a change, and stays within its budget."""

import random

import pytest
from sweep import sampled

from mlx_mtp.tuning.controller import Controller
from mlx_mtp.tuning.costs import ALLOWANCE
from mlx_mtp.tuning.plan import NAMES as DEFAULTS
from mlx_mtp.tuning.plan import PLAIN, Accepted, Cycle, Plan, Role, by_depth

COSTS = {"block": lambda k: 1.25 + 0.06 * k, "heads": lambda k: 1.05 + 0.12 * k}  # plain steps of a cycle
ROW, UNREAD = 0.01, 64  # plain steps per row after a pause, and the maximum of these rows
TOKENS = 1200
NAMES = {**DEFAULTS, Role.MODEL: "block"}


def decode(rates, seed: int, **limits) -> tuple[float, list[tuple[int, Plan]]]:
    """Return tokens per plain step, and (tokens before it, plan) of each cycle.

    rates: share of accepted drafts of each source, by the number of tokens before a cycle.
    """
    draws, control = random.Random(seed), Controller(names=NAMES, **limits)
    tokens, steps, pending, cycles, plan = 0, 0.0, 0, [], control.plan()
    while tokens < TOKENS:
        accepted, cost, prefilled = 0, 1.0, 0
        if plan.k:
            while accepted < plan.k and draws.random() < rates(tokens)[plan.source]:
                accepted += 1
            prefilled, pending = pending, 0
            cost = COSTS[plan.source](plan.k) + ROW * prefilled
        else:
            pending = min(pending + 1, UNREAD)
        cycles.append((tokens, plan))
        seen = Cycle(plan, plan.k, accepted, 0.02 * cost * max(0.5, draws.gauss(1, 0.05)), prefilled)
        plan = control.plan(pending=pending)
        control.observe(seen)
        tokens, steps = tokens + accepted + 1, steps + cost
    return tokens / steps, cycles


def share(cycles, source: str, first: int = 0, end: int = TOKENS) -> float:
    """The share of a source in the cycles between two numbers of tokens."""
    plans = [plan for at, plan in cycles if first <= at < end]
    return sum(plan.k > 0 and plan.source == source for plan in plans) / len(plans)


BOTH = {"max_drafts": 15, "others": {"heads": 3}}


@pytest.mark.parametrize("seed", sampled([0], range(6)))
@pytest.mark.parametrize(
    ("block", "heads", "better"), [(0.85, 0.7, "block"), (0.3, 0.75, "heads"), (0.6, 0.95, "heads")]
)
def test_the_better_source_is_used(block, heads, better, seed):
    """In the second half at the latest: it may be unlucky first. The other one is tried."""
    rates = {"block": block, "heads": heads}
    rate, cycles = decode(lambda at: rates, seed, **BOTH)
    assert share(cycles, better, TOKENS // 2) > 0.9
    assert any(plan.k and plan.source != better for _, plan in cycles)
    alone, _ = decode(lambda at: rates, seed, max_drafts=15)
    assert rate > 0.9 * alone


@pytest.mark.parametrize("seed", sampled([0], range(6)))
def test_a_source_that_becomes_better_is_used_again(seed):
    """Blocks are right in every second third of the text only; the heads always in three of four cases."""
    third = TOKENS // 3

    def rates(at):
        return {"block": 0.9 if at // third == 1 else 0.05, "heads": 0.75}

    _, cycles = decode(rates, seed, **BOTH)
    assert share(cycles, "heads", third // 2, third) > 0.8
    assert share(cycles, "block", third + third // 2, 2 * third) > 0.8
    assert share(cycles, "heads", 2 * third + third // 4) > 0.8


@pytest.mark.parametrize("seed", sampled([0], range(6)))
def test_two_useless_sources_cost_no_more_than_one(seed):
    rate, cycles = decode(lambda at: {"block": 0.03, "heads": 0.03}, seed, **BOTH)
    assert rate > 0.97
    assert sum(plan.k == 0 for _, plan in cycles) > 0.9 * len(cycles)


@pytest.mark.parametrize("seed", sampled([0], range(6)))
def test_both_under_a_grammar(seed):
    """Plans that wait for each draft are tried, too; they gain nothing here."""
    _, cycles = decode(lambda at: {"block": 0.9, "heads": 0.5}, seed, masked=True, **BOTH)
    assert share(cycles, "block", TOKENS // 2) > 0.9
    assert any(plan.stepwise for _, plan in cycles)


def test_each_source_has_its_own_limit_and_its_own_confidence():
    control, seen = Controller(names=NAMES, max_drafts=4, others={"heads": 2}, p_min=True), set()
    for _ in range(400):
        plan = control.plan()
        assert plan.k <= {"block": 4, "heads": 2}[plan.source] or plan == PLAIN
        seen.add((plan.source, plan.p_min)) if plan.k else None
        control.observe(Cycle(plan, plan.k, 0.5 * plan.k, 0.01 * (1 + 0.01 * plan.k)))
    assert {("block", False), ("heads", False)} <= seen
    assert Plan("block", 4, p_min=True).kind != Plan("heads", 2, p_min=True).kind
    assert not Controller(names=NAMES, max_drafts=4, others={"heads": 0}).own.keys() - {"block"}


def after(*cycles: tuple[str, Accepted], **limits) -> Controller:
    """Return a controller after cycles of three drafts at equal costs: (source, its counts)."""
    control = Controller(names=NAMES, max_drafts=3, others={"heads": 3}, **limits)
    for source, counts in cycles:
        control.observe(Cycle(Plan(source, 3), 3, counts.accepted, 0.01, **by_depth([counts], 3)))
    return control


RIGHT, WRONG = Accepted(3, 3), Accepted(0, 3)


def test_a_rejected_forced_draft_is_no_miss_of_the_source():
    """Neither as its first cycle nor between others: its own drafts were not reached."""
    wrong = Accepted(0, 3, 2)
    assert after(("block", wrong)).costs.counts["block"][0] == [0, 0]
    assert after(*[("block", RIGHT)] * 9, *[("block", wrong)] * 9)._missed["block"] == 0
    assert after(*[("block", RIGHT)] * 9, *[("block", Accepted(2, 3, 2))] * 2)._missed["block"] == 2


@pytest.mark.parametrize("wrong", [1, 30])
def test_drafts_that_are_waited_for_have_their_own_counts(wrong):
    """Also before the same source has drafted without: its first plan of two drafts may be one of these."""
    control = after(("heads", RIGHT), masked=True)
    for counts in [RIGHT] * 9 + [WRONG] * wrong:
        control.observe(Cycle(Plan("block", 3, stepwise=True), 3, counts.accepted, 0.01))
    right, seen = control.costs.counts["stepwise"][0]
    assert not control.costs.counts["block"]
    assert right / seen > 0.8 if wrong == 1 else right / seen < 0.12  # 0.17 if counts did not decay


def test_counts_of_the_source_that_does_not_draft_decay():
    before = after(*[("heads", WRONG)] * 9).costs.counts["heads"][0][1]
    later = after(*[("heads", WRONG)] * 9, *[("block", RIGHT)] * 200).costs.counts["heads"][0][1]
    assert later < 0.5 * before


@pytest.mark.parametrize(("left", "tried"), [(0.55, True), (0.45, False)])
def test_no_source_is_retried_while_the_budget_is_half_used(left, tried):
    control = after(*[("heads", WRONG)] * 30, *[("block", RIGHT)] * 30)
    control.costs.plain_first, control.costs.budget, control._risk = 0, left * ALLOWANCE, 0.0
    assert (control.plan().source == "heads") == tried
