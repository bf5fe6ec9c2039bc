"""Chains, trees and plain steps in one comparison: simulated drafters of several choices, on published costs."""

import json
from functools import partial

import numpy as np
import pytest
from simulator import LANES, Machine, compare, lattice, replay, trace
from sweep import sampled

from mlx_mtp.tuning.controller import Controller
from mlx_mtp.tuning.cost_file import from_json, to_json
from mlx_mtp.tuning.costs import Costs
from mlx_mtp.tuning.plan import PLAIN, TREES, Cycle, Fixed, Node, Plan, tree_ladder
from mlx_mtp.tuning.tree_counts import CLASSES, calibrations, class_of, ranks, tree_chances

TREE = {"trees": {"heads": 15}}


def versus(lane, heads, tokens, longest=7, seeds=3, noise=0.1, **drafter):
    where = Machine(LANES[lane], noise=noise)
    words, make = partial(lattice, **drafter), lambda: Controller(max_drafts=longest, **TREE)
    return compare(where, trace(heads, tokens), make, longest, tokens, range(seeds), TREES, words)


# Lane, heads, tokens, drafter, whether the best fixed plan is a tree, least rate over it and over the best chain.
REGIMES = [
    ("M3 Ultra 27B, matrix", "half", 1500, {}, True, 0.93, 1.1),
    ("M3 Ultra 27B, matrix", "decaying", 1000, {}, True, 0.92, 1.02),
    ("M5 Max 27B, matrix", "decaying", 1000, {}, True, 0.91, 1.0),
    ("M3 Ultra 27B, exact", "half", 1000, {}, True, 0.93, 1.0),
    ("M5 Max 27B, exact", "typical", 1000, {}, True, 0.94, 0.96),
    ("published 27B", "half", 1000, {}, False, 0.93, 0.93),
    ("published 27B", "typical", 1000, {}, True, 0.93, 0.95),
    ("CPU", "half", 1000, {}, True, 0.93, 0.94),
    ("CPU", "decaying", 1000, {}, False, 0.94, 0.94),
    ("flat", "half", 1000, {}, True, 0.91, 1.25),
    ("M3 Ultra 27B, matrix", "half", 1000, {"stated": 2.5}, True, 0.92, 1.05),
    ("M3 Ultra 27B, matrix", "decaying", 1000, {"stated": 0.4}, True, 0.92, 1.02),
]


@pytest.mark.parametrize(
    ("lane", "heads", "tokens", "drafter", "tree", "best", "chain"), sampled(REGIMES[::4], REGIMES)
)
def test_close_to_the_best_of_plain_chains_and_trees(lane, heads, tokens, drafter, tree, best, chain):
    found = versus(lane, heads, tokens, **drafter)
    assert found.tree == tree
    assert found.best >= best
    assert found.chain >= chain
    assert found.plain >= 0.97


@pytest.mark.parametrize("lane", sampled(["M3 Ultra 27B, matrix", "CPU"], LANES))
def test_useless_trees_cost_at_most_three_percent(lane):
    """Also of a drafter that states high probabilities."""
    assert versus(lane, "useless", 300, stated=2.5).plain >= 0.97


def used(lane, heads, tokens=1000, **options) -> dict:
    control = Controller(max_drafts=7, **{**TREE, **options})
    found = replay(Machine(LANES[lane], noise=0.1), lattice(trace(heads, tokens), 1), control, tokens, 1)
    return {"cycles": sum(found.ks.values()), "control": control, **found.ks}


def test_where_eight_rows_cost_much_no_tree_of_eight_is_tried_often():
    found = used("CPU", "half")
    assert sum(found.get(("tree", k), 0) for k in (7, 15)) <= 0.01 * found["cycles"]


def test_trees_are_chosen_where_rows_are_cheap():
    found = used("M3 Ultra 27B, matrix", "half")
    assert sum(found.get(("tree", k), 0) for k in TREES) > 0.7 * found["cycles"]
    assert not found["control"].trees_paused


def test_why_trees_do_not_pay_is_said_after_one_was_tried():
    found = used("M3 Ultra 27B, matrix", "useless", 300)
    assert found["control"].trees_paused.startswith("trees do not pay: one costs 1.")
    assert not used("CPU", "half", 300, trees={})["control"].trees_paused
    assert not Controller(max_drafts=3, **TREE).trees_paused


@pytest.mark.parametrize("seed", sampled([0], range(4)))
def test_drafts_return_when_the_drafter_becomes_better(seed):
    """It is useless in the middle of the text. Trees may follow long after chains, as trials are rare by then."""
    rates = np.concatenate([trace("half", 500)[:500], trace("useless", 400)[:400], trace("half", 600)])
    where, cycles = Machine(LANES["M3 Ultra 27B, matrix"], noise=0.1), []
    control = Controller(max_drafts=7, **TREE)
    observe, at = control.observe, [0]

    def noted(cycle: Cycle) -> None:
        cycles.append((at[0], cycle.plan))
        at[0] += int(cycle.accepted) + 1
        observe(cycle)

    control.observe = noted
    replay(where, lattice(rates, seed), control, 1500, seed)

    def share(first: int, end: int, *, tree: bool) -> float:
        plans = [plan for place, plan in cycles if first <= place < end]
        return float(np.mean([plan.tree if tree else plan.k > 0 for plan in plans]))

    assert share(300, 500, tree=True) > 0.7
    assert share(600, 900, tree=False) < 0.2
    assert share(1400, 1500, tree=False) > 0.8
    assert seed or share(1100, 1500, tree=True) > 0.9


def test_without_trees_nothing_changes():
    where, words = Machine(LANES["CPU"], noise=0.1), lattice(trace("typical", 300), 1)
    without, none = Controller(max_drafts=7), Controller(max_drafts=7, trees={"heads": 0})
    assert replay(where, words, without, 300, 1).steps == replay(where, words, none, 300, 1).steps
    assert to_json(without.costs) == to_json(none.costs)


def test_trees_of_copies_are_counted_by_the_length_of_the_match():
    control = Controller(max_drafts=0, max_lookup=7, trees={"lookup": 7})
    assert [*control.trees] == ["lookup"]
    plan = Plan("lookup", 7, tree=True)
    for matched in (3, 20):
        control.observe(Cycle(plan, 7, 1.0, 0.02, matched=matched, nodes=[[Node(1, 0.5, matched == 20)] * 7]))
    counts = control.costs.counts
    assert counts["tree lookup 5"][0][0] > counts["tree lookup 2"][0][0]
    assert "nodes of tree lookup" in counts


def test_sizes_of_trees():
    assert [tree_ladder(most) for most in (0, 1, 2, 3, 4, 7, 15)] == [[], [], [2], [3], [4], [3, 7], [3, 7, 15]]
    assert Fixed(2, nodes=7).plan() == Plan("heads", 7, tree=True)
    assert Fixed(2, nodes=7, max_lookup=7).plan(matched=9) == Plan("lookup", 7)
    control = Controller(max_drafts=2, trees={"heads": 15})
    control.room, seen = 7, set()
    for _ in range(300):
        seen.add(control.plan())
        control.observe(Cycle(PLAIN, 0, 0, 0.01))
        control.costs.levels[Plan("heads", 7, tree=True)] = 0.01
    assert max(plan.k for plan in seen if plan.tree) == 7


def test_a_trees_cost_begins_with_the_chains_and_a_chains_never_with_a_trees():
    costs = Costs()
    for plan, seconds in ((PLAIN, 0.01), (Plan(k=3), 0.013), (Plan(k=7), 0.02), (Plan(k=3, tree=True), 0.03)):
        for _ in range(20):
            costs.observe(plan, seconds)
    assert costs.steps(Plan(k=7, tree=True)) == pytest.approx(2, rel=0.04)
    assert costs.steps(Plan(k=3)) == pytest.approx(1.3, rel=0.05)
    assert costs.steps(Plan(k=4)) == pytest.approx(1.4, rel=0.05)
    kept = from_json(json.loads(json.dumps(to_json(costs))))
    assert {p: kept.steps(p) for p in costs.levels} == pytest.approx({p: costs.steps(p) for p in costs.levels})


def test_probabilities_are_calibrated_by_depth_and_size():
    sure, unsure, deep = Node(1, 0.9, True), Node(1, 0.2, False), Node(9, 0.9, False)
    assert len({class_of(node) for node in (sure, unsure, deep)}) == 3
    assert {class_of(Node(depth, p, True)) for depth in range(1, 16) for p in (0, 0.05, 0.2, 0.5, 0.7, 1)} == {
        *range(CLASSES)
    }
    found = calibrations([[sure, unsure], [Node(1, 0.95, False), deep]])
    assert found[class_of(sure)] == (0.5, 1.0)
    assert found[class_of(deep)] == (0.0, 0.5)
    classes = [[9.0 * (i == class_of(sure)), 9.0] for i in range(CLASSES)]
    (best, seen), (second, _) = ranks([[unsure, sure]], classes)
    assert seen == 1.0
    assert best == pytest.approx(9.45 / 9.5)
    assert second == pytest.approx(0.1 / 9.5)


def test_tokens_of_trees_before_and_after_they_are_observed():
    """Before, at least those of a chain of as many drafts; after, no more than what was kept, and less behind it."""
    chain = [0.5, 0.5, 0.5]
    prior = tree_chances([], chain, 7)
    assert prior == sorted(prior, reverse=True)
    assert sum(prior[:3]) >= sum([0.5, 0.25, 0.125])
    assert sum(prior) < 1.2
    seen = tree_chances([[45.0, 50.0], [15.0, 50.0], [5.0, 50.0]], chain, 7)
    assert seen[:3] == pytest.approx([0.9, 0.3, 0.1], abs=0.02)
    assert 0 < sum(seen[3:]) < 4 * 0.1
