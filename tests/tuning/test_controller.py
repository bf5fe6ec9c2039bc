"""Compare the chosen draft length with fixed ones, on replayed cost tables and acceptance traces."""

import itertools
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator import DRIFTS, TABLES, Machine, Text, compare, known_costs, measured, replay, text, trace
from sweep import sampled, sweep

from mlx_mtp.tuning.controller import Controller
from mlx_mtp.tuning.cost_file import from_json, to_json
from mlx_mtp.tuning.costs import ALLOWANCE
from mlx_mtp.tuning.plan import PLAIN, Cycle, Fixed, Plan, ladder


def machine(table, **changes):
    return Machine(TABLES[table], **{"noise": 0.2, **changes})


@pytest.mark.parametrize("table", sampled([*TABLES][::5], TABLES))
def test_useless_heads_cost_at_most_three_percent(table):
    result = compare(machine(table), trace("useless", 200), lambda: Controller(max_drafts=7), 0, 200, range(8))
    assert result.plain >= 0.97


def too_timid(*case):
    """Mark a case in which the controller drafts fewer tokens than would pay."""
    return pytest.param(*case, marks=pytest.mark.xfail(strict=True, reason="0.92 to 0.95x of the best fixed length"))


# Table, heads, maximum drafts, tokens, error of the known costs, drift, share of cycles without a time.
AGAINST_THE_BEST = [
    ("M5 Max 27B", "typical", 3, 400, None, "none", 0.0),
    ("M5 Max 27B", "perfect", 3, 400, "true", "none", 0.0),
    ("M4 Max 27B", "typical", 3, 400, "x2", "none", 0.33),
    too_timid("M5 Max 70B", "typical", 7, 400, "true", "none", 0.0),
    ("M3 Ultra 27B", "poor", 3, 400, "ratio x2", "none", 0.0),
    ("M1 Max MoE", "typical", 3, 400, "plain x2", "twice", 0.0),
    too_timid("Mac Studio, IQ4_XS", "typical", 3, 400, "plain /2", "none", 0.0),
    ("Mac Studio, Q4_K_S", "perfect", 3, 400, "/2", "half", 0.0),
    ("reference BLAS", "typical", 3, 400, None, "none", 0.0),
    ("OpenBLAS", "useless|perfect", 3, 400, "true", "none", 0.0),
    ("OpenBLAS", "typical|poor", 3, 400, None, "hot", 0.0),
    ("M3 Ultra GLM-5.2", "good", 2, 400, None, "none", 0.0),
    ("flat", "good", 15, 2000, None, "none", 0.0),
]


@pytest.mark.parametrize(
    ("table", "heads", "longest", "tokens", "wrong", "drift", "missing"),
    sampled(AGAINST_THE_BEST[::4], AGAINST_THE_BEST),
)
def test_close_to_the_best_fixed_length_and_to_plain_decoding(table, heads, longest, tokens, wrong, drift, missing):
    where = machine(table, drift=DRIFTS[drift], missing=missing)

    def make():
        return Controller(max_drafts=longest, known=known_costs(where, longest, wrong) if wrong else None)

    result = compare(where, trace(heads, tokens), make, longest, tokens, range(8 if tokens < 1000 else 3))
    assert result.best >= 0.95
    assert result.plain >= 0.97


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    slopes=st.lists(st.floats(0, 1.2), min_size=3, max_size=3),
    depth=st.floats(0.03, 0.2),
    rates=st.lists(st.floats(0, 1), min_size=3, max_size=3),
    seed=st.integers(0, 99),
)
def test_never_slower_than_plain_whatever_cycles_cost(slopes, depth, rates, seed):
    """Without noise, the budget alone bounds the loss."""
    where = Machine(list(1 + np.cumsum([0, *slopes])), depth=depth)
    words = text(np.tile([*rates, *[rates[-1]] * 12], (230, 1)), seed)
    outcome = replay(where, words, Controller(max_drafts=3), 200, seed)
    assert outcome.steps <= 200 / 0.97


@sweep
def test_random_machines_lose_three_percent_hardly_ever_and_never_four():
    """The same bound on 200 random machines, without noise, on runs of 200 tokens."""
    rng, taken = np.random.default_rng(0), []
    for seed in range(200):
        where = Machine(list(1 + np.cumsum([0, *rng.uniform(0, 1.2, 3)])), depth=rng.uniform(0.03, 0.2))
        rates = [*rng.choice([0, 0.25, 0.5, 0.75, 1], 3)]
        words = text(np.tile([*rates, *[rates[-1]] * 12], (230, 1)), seed)
        taken.append(replay(where, words, Controller(max_drafts=3), 200, seed).steps)
    assert max(taken) <= 200 / 0.96
    assert np.mean(np.array(taken) <= 200 / 0.97) >= 0.99


def test_a_plain_step_that_was_measured_too_slow_is_measured_again():
    """Useless heads seem cheap compared with it, and would draft forever."""
    where, seen, took, plan = machine("reference BLAS", noise=0.0), Controller(max_drafts=2), 0.0, Plan()
    for i in range(200):
        steps = (1.7 if i == 0 else 1) * (where.verify(plan.k + 1) + where.depth * plan.k)
        following = seen.plan()
        seen.observe(Cycle(plan, plan.k, 0, 0.02 * steps))
        plan, took = following, took + steps
    assert took <= 200 / 0.96


def test_a_cycle_that_compiles_does_not_count_as_the_cost_of_its_length():
    where = machine("M5 Max 27B", slow_first=20.0, noise=0.05)
    seen = Controller(max_drafts=3)
    outcome = replay(where, text(trace("typical", 2000), 1), seen, 2000, 1)
    assert outcome.steps < 0.75 * 2000
    assert max(outcome.ks, key=lambda arm: outcome.ks[arm])[1] in (2, 3)
    assert seen.costs.steps(Plan("heads", 3)) == pytest.approx(1.28 + 3 * where.depth, rel=0.1)


def copying(tokens: int, right: float) -> Text:
    n = tokens + 20
    rng = np.random.default_rng(3)
    return Text(rng.random((n, 15)) < 0.3, matched=np.full(n, 12), copied=rng.random(n) < right)


def test_lookup_drafts_are_used_only_if_they_are_accepted():
    where = machine("M5 Max 27B")
    plain = replay(where, copying(400, 0.97), Fixed(0), 400, 1)
    right = replay(where, copying(400, 0.97), Controller(max_drafts=3, max_lookup=7), 400, 1)
    assert right.steps < plain.steps / 2
    wrong = replay(where, copying(400, 0.0), Controller(max_drafts=3, max_lookup=7), 400, 1)
    assert wrong.steps < plain.steps / 0.95
    assert sum(n for (source, _), n in wrong.ks.items() if source == "lookup") < 20


@pytest.mark.parametrize(("read", "pays"), [(0.0, True), (0.8, False)])
def test_confidence_is_read_only_if_it_pays(read, pays):
    """Half of the drafts are right, and the confidence shows which."""
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
        plan = seen.plan(matched=9 * (i % 3 == 0), pending=0)
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
    assert len(ladder(15)) <= 7


@pytest.mark.parametrize("longest", range(1, 16))
def test_ladders_lose_nothing(longest):
    """The best length of a ladder has nearly the rate of the best of all lengths, on average and at worst."""
    shares = []
    cases = itertools.product((0.3, 0.5, 0.7, 0.85, 0.95, 1.0), (0.01, 0.05, 0.15, 0.3), (0.05, 0.3))
    for right, row, fixed in cases:
        tokens = [sum(right**i for i in range(k + 1)) for k in range(longest + 1)]
        rates = [1.0, *(tokens[k] / (1 + fixed + row * k) for k in range(1, longest + 1))]
        shares.append(max(rates[k] for k in (0, *ladder(longest))) / max(rates))
    assert min(shares) > 0.97
    assert np.mean(shares) > 0.995


def test_an_expensive_confidence_is_not_read_if_heads_pay_without_it():
    words = text(trace("good", 600), 1)
    words.sure = np.ones(words.right.shape)
    where = machine("OpenBLAS", read=0.8)
    without = replay(where, words, Controller(max_drafts=3), 600, 1)
    offered = replay(where, words, Controller(max_drafts=3, p_min=True), 600, 1)
    assert offered.steps < 1.05 * without.steps


def test_rejected_short_matches_do_not_affect_long_ones():
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
def test_paused_heads_resume_although_the_cost_rises_with_every_row(row):
    """The budget for a trial must grow with the cost of resuming."""
    costs, control = {0: 1.0, 1: 1.2, 2: 1.4, 3: 1.6}, Controller(max_drafts=3)
    pending, paused, longest = 0, 0, 0
    for _ in range(600):
        plan = control.plan(0, pending)
        prefilled = pending if plan.k else 0
        control.observe(Cycle(plan, plan.k, 0, costs[plan.k] + row * prefilled, prefilled))
        pending = 0 if plan.k else pending + 1
        paused = 0 if plan.k else paused + 1
        longest = max(longest, paused)
    assert 10 < longest < 100


@pytest.mark.parametrize(
    "counts", [[[1.0, 1.0, 1.0]], [[-1.0, 1.0]], [[1.0]], 3, [["a", 1.0]], [[0.0, float("inf")]]]
)
def test_impossible_counts_are_refused(counts):
    kept = to_json(known_costs(machine("OpenBLAS"), 3, "true"))
    with pytest.raises(ValueError, match="no costs"):
        from_json({**kept, "counts": {"heads": counts}})


def test_costs_are_the_same_after_a_file():
    seen = Controller(max_drafts=3, max_lookup=7)
    replay(machine("reference BLAS"), copying(200, 0.5), seen, 200, 1)
    costs, again = seen.costs, from_json(json.loads(json.dumps(to_json(seen.costs))))
    assert (again.counts, again.budget, again.retry_at, again.row) == (
        costs.counts,
        costs.budget,
        costs.retry_at,
        costs.row,
    )
    assert {p: again.steps(p) for p in costs.levels} == pytest.approx({p: costs.steps(p) for p in costs.levels})


def test_known_costs_are_not_modified():
    known = measured({PLAIN: 0.01, Plan("heads", 1): 0.012})
    before = json.dumps(to_json(known))
    replay(machine("reference BLAS"), text(trace("useless", 50), 1), Controller(max_drafts=3, known=known), 50, 1)
    assert json.dumps(to_json(known)) == before


def answers(where: Machine, heads: str, length: int) -> list[float]:
    """Return plain decoding's steps over the controller's, of 50 answers that share their costs."""
    known, ratios = None, []
    for i in range(50):
        control = Controller(max_drafts=3, known=known)
        took = replay(where, text(trace(heads, length), i), control, length, i).steps
        plain = replay(where, text(trace(heads, length), i), Fixed(0), length, i).steps
        ratios.append(plain / took)
        known = control.costs
    return ratios


@pytest.mark.parametrize("length", [8, 20, 50])
@pytest.mark.parametrize("table", sampled(["reference BLAS", "M5 Max 27B"], [*TABLES]))
def test_many_short_answers_do_not_repeat_the_same_trials(table, length):
    later = answers(machine(table, noise=0.05), "useless", length)[2:]
    assert len(later) / sum(1 / ratio for ratio in later) >= 0.97


def test_short_answers_draft_from_the_second_on_if_that_pays():
    later = answers(machine("OpenBLAS", noise=0.05), "typical", 20)[1:]
    assert len(later) / sum(1 / ratio for ratio in later) > 1.6


def test_the_budget_carries_over_to_the_next_sequence():
    where, control = machine("M3 Ultra GLM-5.2", noise=0.0), Controller(max_drafts=3)
    replay(where, text(trace("useless", 20), 1), control, 20, 1)
    assert control.costs.budget < 2
    following = Controller(max_drafts=3, known=control.costs)
    assert replay(where, text(trace("useless", 20), 2), following, 20, 2).ks == {("heads", 0): 20}
    assert control.costs.budget < following.costs.budget


def test_no_answer_pauses_because_earlier_ones_were_disturbed():
    """On a busy machine each answer begins slowly, and its first cycle includes the heads' prefill."""
    busy, known = {"depth": 0.2, "row": 0.015, "resume": 0.4, "prompt": 30, "begin": 1.5, "busy": True}, None
    where, ratios = machine("OpenBLAS", **{**busy, "noise": 0.1}), []
    for i in range(40):
        control = Controller(max_drafts=3, known=known)
        words = text(trace("typical", 250), i)
        steps = [replay(where, words, each, 250, i).steps for each in (Fixed(2), control)]
        ratios.append(steps[0] / steps[1])
        known = control.costs
    assert np.median(ratios[1:]) >= 0.97
    assert sum(ratio < 0.8 for ratio in ratios[1:]) <= 3


@pytest.mark.parametrize("at", [0, 5, 40])
def test_a_pause_of_the_machine_does_not_pause_drafting(at):
    where = machine("OpenBLAS", noise=0.05, pause=(at, 25.0))
    calm = replay(machine("OpenBLAS", noise=0.05), text(trace("typical", 250), 1), Controller(max_drafts=3), 250, 1)
    paused = replay(where, text(trace("typical", 250), 1), Controller(max_drafts=3), 250, 1)
    assert paused.steps - 25 < 1.05 * calm.steps


def test_a_slow_period_while_drafting_is_not_charged_to_drafts():
    """A fifth of each run takes 3.5 times as long; the plain step after it shows that drafts are not the cause."""
    where, ratios = machine("OpenBLAS", depth=0.2, noise=0.05, drift=lambda at, _: 3.5 if 0.2 < at < 0.4 else 1.0), []
    for seed in range(20):
        words = text(trace("typical", 250), seed)
        steps = [replay(where, words, each, 250, seed).steps for each in (Fixed(3), Controller(max_drafts=3))]
        ratios.append(steps[0] / steps[1])
    assert np.median(ratios) >= 0.95  # 0.81 if the loss is charged


def test_paused_has_the_reason():
    seen = Controller(max_drafts=3)
    assert not seen.paused
    replay(machine("reference BLAS", noise=0.0), text(trace("useless", 100), 1), seen, 100, 1)
    assert re.fullmatch(r"costs 1\.\d plain steps, gains 1\.\d tokens", seen.paused)
    drafting = Controller(max_drafts=3)
    replay(machine("OpenBLAS", noise=0.0), text(trace("good", 100), 1), drafting, 100, 1)
    assert not drafting.paused


def test_paused_names_only_losses_that_have_happened():
    for budget, reason in ((ALLOWANCE, r"may lose \d\.\d plain steps in a cycle"), (1.8, "lost 1.2 plain steps")):
        seen = Controller(max_drafts=3)
        seen.costs.plain_first, seen.costs.budget, seen._risk = 0, budget, budget  # the cycle before may lose it all
        assert not seen.plan().k
        assert re.fullmatch(reason, seen.paused)


def test_paused_has_no_reason_for_a_cycle_that_cannot_draft_measures_or_drafts():
    """Without a match, prompt lookup alone has no drafts; a grammar's own drafts do not need the drafter's."""
    without_match, measuring, forced = (Controller(max_drafts=0, max_lookup=7) for _ in range(3))
    for seen in (without_match, measuring, forced):
        while not seen.paused:
            plan = seen.plan(20)
            seen.observe(Cycle(plan, plan.k, 0, 0.02 * (1 + plan.k), matched=20))
    without_match.plan(0)
    measuring.costs.plain_first = 1
    measuring.plan(20)
    forced.costs.budget, forced.costs.retry_at["lookup 5"] = 9.0, float("inf")
    forced.plan(20)
    assert forced.redraft(PLAIN, [0]) == PLAIN
    assert forced.paused
    assert forced.redraft(PLAIN, [5]).source == "grammar"
    assert not without_match.paused
    assert not measuring.paused
    assert not forced.paused


def test_a_paused_controller_uses_lookup_for_a_new_match():
    """Useless heads in a sequence that copies, then does not, then copies again."""
    seen, sources = Controller(max_drafts=2, max_lookup=7), []
    for i in range(120):
        matched = 0 if 30 <= i < 90 else 20
        plan = seen.plan(matched, pending=9)
        accepted, slope = (plan.k, 0.1) if plan.source == "lookup" else (0, 0.6)
        seen.observe(Cycle(plan, plan.k, accepted, 0.02 * (1 + slope * plan.k), matched=matched))
        sources.append((plan.source, plan.k > 0))
    assert ("heads", False) in sources[30:90]
    assert {source for source, *_ in sources[91:]} == {"lookup"}


def test_plans_have_at_most_twice_the_longest_measured_number_of_drafts():
    for longest in (0, *ladder(7)):
        control = Controller(max_drafts=7, p_min=True)
        control.costs.levels[Plan("heads", longest) if longest else PLAIN] = 0.1
        offered = [choice.plan for choice in control._choices(0, 0)]
        assert [plan.k for plan in offered if not plan.p_min] == [k for k in ladder(7) if k <= max(1, 2 * longest)]
        assert (control.confident["heads"] in offered) == (longest >= 2)
