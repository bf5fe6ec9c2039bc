"""Compare the chosen draft length with fixed ones, on replayed cost tables and acceptance traces."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import DRIFTS, TABLES, Machine, Text, compare, known_costs, replay, text, trace
from sweep import sampled, sweep

from mlx_mtp.tuning.controller import Controller, Cycle, Fixed, Plan
from mlx_mtp.tuning.costs import PLAIN, Costs, ladder


def machine(table, **changes):
    return Machine(TABLES[table], **{"noise": 0.2, **changes})


def test_what_is_far_slower_twice_makes_every_cost_doubtful():
    costs, arm = Costs(3), ("heads", 1)
    for _ in range(20):
        costs.observe(PLAIN, 0.010)
        costs.observe(arm, 0.012)
    before = costs.doubt(arm)
    assert [costs.observe(PLAIN, 0.1) for _ in range(2)] == [False, True]
    assert costs.doubt(arm) > 2 * before
    assert costs.seconds(arm) > 0.06


@pytest.mark.parametrize("table", sampled([*TABLES][::3], TABLES))
def test_useless_heads_cost_at_most_three_percent(table):
    result = compare(machine(table), trace("useless", 200), lambda: Controller(max_drafts=7), 0, 200, range(8))
    assert result.plain >= 0.97


# Table, heads, most drafts, tokens, what is known, drift, cycles without a time.
AGAINST_THE_BEST = [
    ("M5 Max 27B", "typical", 3, 400, None, "none", 0.0),
    ("M5 Max 27B", "perfect", 3, 400, "true", "none", 0.0),
    ("M4 Max 27B", "typical", 3, 400, "x2", "none", 0.33),
    ("M5 Max 70B", "typical", 7, 400, "true", "none", 0.0),
    ("M3 Ultra 27B", "poor", 3, 400, "ratio x2", "none", 0.0),
    ("M1 Max MoE", "typical", 3, 400, "plain x2", "twice", 0.0),
    ("Mac Studio, IQ4_XS", "typical", 3, 400, "plain /2", "none", 0.0),
    ("Mac Studio, Q4_K_S", "perfect", 3, 400, "/2", "half", 0.0),
    ("reference BLAS", "typical", 3, 400, None, "none", 0.0),
    ("OpenBLAS", "useless|perfect", 3, 400, "true", "none", 0.0),
    ("OpenBLAS", "typical|poor", 3, 400, None, "hot", 0.0),
    ("M3 Ultra GLM-5.2", "good", 2, 400, None, "none", 0.0),
    ("flat", "good", 15, 2000, None, "none", 0.0),
]


@pytest.mark.parametrize(
    ("table", "heads", "most", "tokens", "wrong", "drift", "missing"),
    sampled(AGAINST_THE_BEST[::2], AGAINST_THE_BEST),
)
def test_close_to_the_best_fixed_length_and_to_plain_decoding(table, heads, most, tokens, wrong, drift, missing):
    where = machine(table, drift=DRIFTS[drift], missing=missing)

    def make():
        return Controller(max_drafts=most, known=known_costs(where, most, wrong) if wrong else None)

    result = compare(where, trace(heads, tokens), make, most, tokens, range(8 if tokens < 1000 else 3))
    assert result.best >= 0.95
    assert result.plain >= 0.97


@pytest.mark.xfail(
    reason="of 1,500 random machines 4 take up to 3.4% longer: the plain step was misjudged", strict=False
)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    slopes=st.lists(st.floats(0, 1.2), min_size=3, max_size=3),
    depth=st.floats(0.03, 0.2),
    rates=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    seed=st.integers(0, 99),
)
def test_never_slower_than_plain_whatever_cycles_cost(slopes, depth, rates, seed):
    """Without noise, so that luck with the clock is no excuse: the accounts bound what trying costs."""
    where = Machine(list(1 + np.cumsum([0, *slopes])), depth=depth)
    words = text(np.tile([*rates, *[rates[-1]] * 12], (230, 1)), seed)
    outcome = replay(where, words, Controller(max_drafts=3), 200, seed)
    assert outcome.steps <= 200 / 0.97


@sweep
def test_random_machines_lose_three_percent_hardly_ever_and_never_four():
    """What holds of the test above, without noise, on runs of 200 tokens."""
    rng, taken = np.random.default_rng(0), []
    for seed in range(200):
        where = Machine(list(1 + np.cumsum([0, *rng.uniform(0, 1.2, 3)])), depth=rng.uniform(0.03, 0.2))
        rates = [*rng.choice([0, 0.25, 0.5, 0.75, 1], 3)]
        words = text(np.tile([*rates, *[rates[-1]] * 12], (230, 1)), seed)
        taken.append(replay(where, words, Controller(max_drafts=3), 200, seed).steps)
    assert max(taken) <= 200 / 0.96
    assert np.mean(np.array(taken) <= 200 / 0.97) >= 0.99


def test_a_plain_step_that_was_measured_when_it_was_unlucky_is_measured_again():
    """Useless heads look cheap beside it, and go on drafting if nothing asks again."""
    where, seen, took, plan = machine("reference BLAS", noise=0.0), Controller(max_drafts=2), 0.0, Plan()
    for i in range(200):
        steps = (1.7 if i == 0 else 1) * (where.verify(plan.k + 1) + where.depth * plan.k)
        following = seen.plan()
        seen.observe(Cycle(plan, plan.k, 0, 0.02 * steps))
        plan, took = following, took + steps
    assert took <= 200 / 0.96


def test_a_parked_controller_looks_up_from_its_rest_for_a_match():
    """Useless heads in a text that was copied, and is copied again after a while."""
    seen, sources = Controller(max_drafts=2, max_lookup=7), []
    for i in range(120):
        matched = 0 if 30 <= i < 90 else 20
        plan = seen.plan(matched, behind=9)
        resting = seen.resting
        accepted, slope = (plan.k, 0.1) if plan.source == "lookup" else (0, 0.6)
        seen.observe(Cycle(plan, plan.k, accepted, 0.02 * (1 + slope * plan.k), matched=matched))
        sources.append((plan.source, plan.k > 0, resting > 0))
    assert ("heads", False, True) in sources[30:90]
    assert {source for source, *_ in sources[91:]} == {"lookup"}


def test_costs_that_runs_agree_on_are_believed_and_those_that_changed_are_not():
    def run(known, factor):
        costs = Costs(3, known=known)
        for _ in range(9):
            costs.observe(PLAIN, 0.01)
            costs.observe(("heads", 1), 0.01 * factor)
        costs.confirm()
        return costs

    first = run(None, 1.5)
    second, third = run(first, 1.5), run(run(first, 1.5), 1.5)
    assert [c.confirmed for c in (first, second, third)] == [0, 1, 2]
    spreads = [Costs(3, known=c).spread(("heads", 1), PLAIN) for c in (first, second, third)]
    assert spreads[2] < spreads[1] < spreads[0] / 1.9
    assert run(third, 2.5).confirmed == 0
    assert Costs.from_json(third.to_json()).confirmed == 2
    idle = Costs(3, known=third)
    idle.observe(PLAIN, 0.01)
    idle.confirm()
    assert idle.confirmed == 2


def test_a_run_with_costs_that_are_sure_begins_with_drafts():
    costs = Costs.from_json({**measured_costs(), "drafts": [[30.0, 32.0]] * 3, "confirmed": 2})
    assert Controller(max_drafts=3, known=costs).plan().k >= 2
    costs.confirmed = 0
    assert Controller(max_drafts=3, known=costs).plan().k == 0


def measured_costs():
    return {"seconds": [["heads", k, 0.01 * (1 + 0.1 * k)] for k in range(4)], "catch_up": 0.01}


def test_a_first_cycle_that_compiles_is_not_what_its_length_costs():
    where = machine("M5 Max 27B", slow_first=20.0, noise=0.05)
    seen = Controller(max_drafts=3)
    outcome = replay(where, text(trace("typical", 2000), 1), seen, 2000, 1)
    assert outcome.steps < 0.75 * 2000
    assert max(outcome.ks, key=lambda arm: outcome.ks[arm])[1] in (2, 3)
    assert seen.costs.steps(("heads", 3)) == pytest.approx(1.28 + 3 * where.depth, rel=0.1)


def copying(tokens: int, right: float) -> Text:
    n = tokens + 20
    rng = np.random.default_rng(3)
    return Text(rng.random((n, 15)) < 0.3, matched=np.full(n, 12), copied=rng.random(n) < right)


def test_prompt_drafts_are_used_where_they_are_right_and_only_there():
    where = machine("M5 Max 27B")
    plain = replay(where, copying(400, 0.97), Fixed(0), 400, 1)
    right = replay(where, copying(400, 0.97), Controller(max_drafts=3, max_lookup=7), 400, 1)
    assert right.steps < plain.steps / 2
    wrong = replay(where, copying(400, 0.0), Controller(max_drafts=3, max_lookup=7), 400, 1)
    assert wrong.steps < plain.steps / 0.95
    assert sum(n for (source, _), n in wrong.ks.items() if source == "lookup") < 20


@pytest.mark.parametrize(("read", "pays"), [(0.0, True), (0.8, False)])
def test_confidence_is_read_only_where_it_pays(read, pays):
    """Half the texts' drafts are right and the heads know which."""
    rng = np.random.default_rng(2)
    right = np.repeat(rng.random((700, 1)) < 0.5, 15, axis=1)
    words = Text(right, sure=np.where(right, 0.9, 0.1))
    where = machine("Nemotron", read=read, depth=0.03)
    seen = Controller(max_drafts=7, p_min=True)
    plans = []
    seen.plan, ask = lambda *a: plans.append(ask(*a)) or plans[-1], seen.plan
    replay(where, words, seen, 600, 1)
    used = sum(plan.p_min for plan in plans[len(plans) // 2 :]) / (len(plans) - len(plans) // 2)
    assert used > 0.5 if pays else used < 0.15


def test_plans_stay_within_their_limits():
    seen = Controller(max_drafts=2, max_lookup=3)
    for i in range(300):
        plan = seen.plan(matched=9 * (i % 3 == 0), behind=0)
        assert plan.k <= (3 if plan.source == "lookup" else 2)
        assert plan.source == "heads" or i % 3 == 0
        seen.observe(Cycle(plan, plan.k, plan.k, 0.01, matched=9 * (i % 3 == 0)))
    none = Controller(max_drafts=0)
    assert {none.plan() for _ in range(9)} == {Plan()}


def test_fixed():
    fixed = Fixed(3, max_lookup=7, p_min=True)
    assert fixed.plan() == Plan("heads", 3, p_min=True)
    assert fixed.plan(matched=3) == Plan("lookup", 7)
    assert Fixed(2).plan(matched=30) == Plan("heads", 2)
    assert Fixed(0, p_min=True).plan() == Plan()


def test_ladders_are_short_and_reach_the_end():
    assert ladder(0) == []
    assert ladder(3) == [1, 2, 3]
    assert ladder(15)[-1] == 15
    assert len(ladder(15)) <= 10


def test_measured_costs_are_known_and_the_others_follow():
    costs = Costs(3, 7)
    for _ in range(50):
        for arm, seconds in {PLAIN: 0.01, ("heads", 1): 0.016, ("lookup", 3): 0.02, ("heads", 3): 0.025}.items():
            costs.observe(arm, seconds)
    assert costs.seconds(PLAIN) == pytest.approx(0.01, rel=0.02)
    assert costs.steps(("heads", 1)) == pytest.approx(1.6, rel=0.02)
    assert 1.6 < costs.steps(("heads", 2)) < 2.5


def test_one_slow_cycle_is_forgotten_and_two_are_believed():
    costs = Costs(3)
    for _ in range(20):
        costs.observe(PLAIN, 0.01)
    assert not costs.observe(PLAIN, 0.2)
    assert costs.seconds(PLAIN) == pytest.approx(0.01, rel=0.05)
    assert costs.observe(PLAIN, 0.01)
    assert not costs.observe(PLAIN, 0.2)
    assert costs.observe(PLAIN, 0.2)
    assert costs.seconds(PLAIN) > 0.1


def test_catching_up_is_no_cost_of_the_arm():
    costs = Costs(3)
    for _ in range(30):
        costs.observe(PLAIN, 0.01)
        costs.observe(("heads", 1), 0.013)
    for _ in range(20):
        costs.observe(("heads", 1), 0.013 + 50 * 0.0005, caught_up=50)
    assert costs.steps(("heads", 1)) == pytest.approx(1.3, rel=0.05)
    assert costs.row == pytest.approx(0.05, rel=0.1)


def test_a_confidence_that_is_dear_to_read_is_left_alone_where_heads_pay_without():
    words = text(trace("good", 600), 1)
    words.sure = np.ones(words.right.shape)
    where = machine("OpenBLAS", read=0.8)
    without = replay(where, words, Controller(max_drafts=3), 600, 1)
    offered = replay(where, words, Controller(max_drafts=3, p_min=True), 600, 1)
    assert offered.steps < 1.05 * without.steps


def test_short_matches_that_are_wrong_do_not_spoil_long_ones():
    seen, used = Controller(max_drafts=0, max_lookup=7), {3: 0, 20: 0}
    for i in range(400):
        matched = 20 if i % 2 else 3
        plan = seen.plan(matched=matched)
        right = plan.k if matched == 20 else 0
        seen.observe(Cycle(plan, plan.k, right, 0.01 * (1 + 0.2 * plan.k), matched=matched))
        used[matched] += plan.k > 0
    assert used[20] > 150
    assert used[3] < 50


@pytest.mark.parametrize("row", [0.003, 0.01])
def test_parked_heads_come_back_although_that_costs_more_with_every_row(row):
    """What was lost before must not keep them out for good: what a return may cost rises with its price."""
    costs, control = {0: 1.0, 1: 1.2, 2: 1.4, 3: 1.6}, Controller(max_drafts=3)
    behind, parked, longest = 0, 0, 0
    for _ in range(600):
        plan = control.plan(0, behind)
        caught_up = behind if plan.k else 0
        control.observe(Cycle(plan, plan.k, 0, costs[plan.k] + row * caught_up, caught_up))
        behind = 0 if plan.k else behind + 1
        parked = 0 if plan.k else parked + 1
        longest = max(longest, parked)
    assert 10 < longest < 100


def test_a_run_begins_with_what_earlier_runs_drafted():
    known = known_costs(machine("OpenBLAS"), 3, "true")
    for _ in range(300):
        known.drafted(3, 0)
    useless = Costs.from_json(json.loads(json.dumps(known.to_json())))
    assert [right for right, _ in useless.drafts] == [0.0] * 3
    assert [seen > 30 for _, seen in useless.drafts] == [True, False, False]
    control = Controller(max_drafts=3, known=useless)
    assert control.heads.tokens()[3] < 1.3 < Controller(max_drafts=3).heads.tokens()[1]
    for _ in range(300):
        known.drafted(3, 3)
    (right, seen), *deeper = known.drafts
    assert 0.9 * seen < right < seen <= 64
    assert all(0 < right == seen <= 64 for right, seen in deeper)


@pytest.mark.parametrize("drafts", [[[2.0, 1.0]], [[-1.0, 1.0]], [[1.0]], 3, [["a", 1.0]], [[0.0, 1e9]]])
def test_counts_that_cannot_be_are_refused(drafts):
    kept = known_costs(machine("OpenBLAS"), 3, "true").to_json()
    with pytest.raises(ValueError, match="no costs"):
        Costs.from_json({**kept, "drafts": drafts})
