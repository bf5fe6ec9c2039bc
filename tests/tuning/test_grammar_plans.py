"""Plans under a grammar: waiting for each draft where that is faster, and forced drafts before the drafter's own."""

import random

import pytest

from mlx_mtp.tuning.controller import Controller
from mlx_mtp.tuning.plan import PLAIN, Accepted, Cycle, Plan, by_depth

MASKED, RAW = (0.9, 0.9, 0.9), (0.9, 0.1, 0.1)  # shares of accepted drafts by depth


def cycle(rng, plan, wait):
    """Return the outcome of a cycle of drafts of which all are masked, at `wait` plain steps each, or the first."""
    rates = MASKED if plan.stepwise else RAW
    right = next((i for i in range(plan.k) if rng.random() > rates[i]), plan.k)
    seconds = 0.01 * (1 + 0.15 * plan.k + wait * (plan.stepwise and plan.k - 1))
    return Cycle(plan, plan.k, right, seconds * rng.uniform(0.98, 1.02))


@pytest.mark.parametrize(("wait", "stepwise"), [(0.02, True), (2.0, False)])
def test_each_draft_is_waited_for_where_that_is_faster(wait, stepwise):
    rng, control, plans = random.Random(3), Controller(max_drafts=3, masked=True), []
    for _ in range(300):
        plans.append(control.plan())
        control.observe(cycle(rng, plans[-1], wait))
    late = plans[200:]
    assert sum(plan.stepwise for plan in late) > 85 if stepwise else sum(plan.stepwise for plan in late) < 15
    assert not any(plan.stepwise for plan in (Controller(max_drafts=3).plan() for _ in range(9)))


@pytest.mark.parametrize("stepwise", [False, True])
def test_costs_of_waiting_are_kept_apart(stepwise):
    """Also of a cycle that verifies fewer drafts than planned."""
    control, did = Controller(max_drafts=3, masked=True), Plan("heads", 2, stepwise=stepwise)
    for _ in range(3):
        control.observe(Cycle(Plan("heads", 3, stepwise=stepwise), 2, 1.0, 0.01))
    assert control.costs.levels.keys() == {PLAIN, did}


def taught(**rates):
    """Return a controller that has seen each kind of drafts accepted in a given share, at 0.1 plain steps a draft."""
    control, rng = Controller(max_drafts=3, max_lookup=7), random.Random(1)
    for _ in range(60):
        for plan in (PLAIN, *(Plan(source, k) for source in rates for k in (2, 3, 7))):
            rate = rates.get(plan.source, 0)
            right = next((i for i in range(plan.k) if rng.random() > rate), plan.k)
            control.observe(Cycle(plan, plan.k, right, 0.01 * (1 + 0.1 * plan.k)))
    control.costs.budget = 12.0
    return control


def redrafted(control, planned, forced):
    control._measures, control._spare, control._kind = False, 9.0, control.kind_of(planned, 9)
    return control.redraft(planned, forced)


def test_forced_drafts_replace_a_plan_that_would_verify_fewer():
    control, three = taught(heads=0.8, grammar=0.97), Plan("heads", 3)
    assert redrafted(control, PLAIN, [2]) == Plan("grammar", 2)
    assert redrafted(control, three, [2]) == three  # it verifies both, and one of its own
    assert redrafted(control, three, [7]).source == "grammar"
    assert redrafted(control, three, [7, 0, 0, 0]) == three
    assert redrafted(control, three, [7, 7, 7, 0]).source == "grammar"
    assert redrafted(taught(heads=0.02, grammar=0.97), three, [2]) == Plan("grammar", 2)
    assert redrafted(taught(heads=0.8, lookup=0.02, grammar=0.97), Plan("lookup", 3), [3]).source == "grammar"


def test_forced_drafts_are_counted_apart():
    control, each = Controller(max_drafts=3), [Accepted(2, 3, 2), Accepted(2, 3, 2)]
    for _ in range(50):
        control.observe(Cycle(Plan("heads", 3), 3, 2.0, 0.01, **by_depth(each, 3)))
    heads, grammar = control.costs.counts["heads"], control.costs.counts["grammar"]
    assert [right / seen for right, seen in grammar if seen] == [1, 1]
    assert [right / seen for right, seen in heads if seen] == [0]
