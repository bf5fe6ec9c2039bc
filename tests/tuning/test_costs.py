"""Costs of plans and of resuming are estimated from measured cycles."""

import pytest
from simulator import measured

from mlx_mtp.tuning.plan import PLAIN, Plan


def test_measured_costs_are_exact_and_others_are_interpolated():
    seconds = {PLAIN: 0.01, Plan("heads", 1): 0.016, Plan("lookup", 3): 0.02, Plan("heads", 3): 0.025}
    costs = measured(seconds)
    assert costs.steps(Plan("heads", 1)) == pytest.approx(1.6, rel=0.02)
    assert 1.6 < costs.steps(Plan("heads", 2)) < 2.5
    assert costs.steps(Plan("heads", 7)) == pytest.approx(4.3, rel=0.1)
    assert costs.steps(Plan("lookup", 7)) == pytest.approx(1 + 7 / 3, rel=0.02)


def test_one_slow_cycle_changes_no_estimate_and_several_in_a_row_do():
    draft = Plan("heads", 1)
    costs = measured({PLAIN: 0.01, draft: 0.012})
    assert costs.observe(draft, 0.5) < 4
    assert costs.steps(draft) == pytest.approx(1.2, rel=0.02)
    for _ in range(60):
        costs.observe(draft, 0.06)
        costs.observe(PLAIN, 0.01)
    assert costs.steps(draft) > 4


def test_resuming_does_not_count_as_a_cost_of_drafts():
    draft = Plan("heads", 1)
    costs = measured({PLAIN: 0.01, draft: 0.013})
    for _ in range(40):
        costs.observe(PLAIN, 0.01)
        costs.observe(draft, 0.013 + 50 * 0.0005, prefilled=50)
        costs.observe(draft, 0.013)
    assert costs.steps(draft) == pytest.approx(1.3, rel=0.05)
    assert costs.row == pytest.approx(0.05, rel=0.1)


def test_resuming_has_a_constant_cost_and_one_per_row():
    """A fifth of a plain step and a thousandth per row; the cost of drafts is unchanged."""
    draft = Plan("heads", 1)
    costs = measured({PLAIN: 0.01, draft: 0.013})
    for rows in [2, 40] * 30:
        costs.observe(PLAIN, 0.01)
        costs.observe(draft, 0.015 + rows * 1e-5, prefilled=rows)
    assert costs.steps(draft) == pytest.approx(1.3, rel=0.03)
    assert costs.resume_steps(2) == pytest.approx(0.2, abs=0.05)
    assert costs.resume_steps(40) == pytest.approx(0.24, abs=0.05)
