"""Costs of cycles by context and by the number of experts that their rows use."""

import pytest
from simulator import TABLES, Machine, compare, trace
from sweep import sampled

from mlx_mtp.tuning.controller import Controller
from mlx_mtp.tuning.costs import Costs, mixture
from mlx_mtp.tuning.plan import Plan

# Table, heads, contexts at the start and the end, cost of a row per 1,024 positions: wide verifies pay at first only.
DEEP = [
    ("flat", "decaying", (2_000, 32_000), 0.02),
    ("M5 Max 27B", "good", (2_000, 32_000), 0.01),
    ("M3 Ultra 27B", "typical", (2_000, 64_000), 0.005),
    ("flat", "typical", (32_000, 34_000), 0.02),
]


@pytest.mark.parametrize(("table", "heads", "contexts", "row"), sampled(DEEP[:1], DEEP))
def test_a_long_context_changes_the_costs_of_rows(table, heads, contexts, row):
    where = Machine(TABLES[table], noise=0.1, contexts=contexts, row_context=row)
    result = compare(where, trace(heads, 1500), lambda: Controller(max_drafts=15), 15, 1500, range(3))
    assert result.best >= 0.93
    assert result.plain >= 0.97


def measure(costs: Costs, seconds: dict[int, float], context: int = 0) -> None:
    costs.reach(context)
    for k, each in seconds.items():
        for _ in range(20):
            costs.observe(Plan(k=k), each)


def test_a_length_is_predicted_from_others_at_its_context_before_it_is_tried():
    """Costs of a context return with it, and one length measured at a new one moves all others."""
    costs = Costs()
    measure(costs, {0: 1.0, 3: 1.3, 7: 1.7})
    measure(costs, {0: 1.0, 3: 1.9}, context=32_000)
    assert costs.steps(Plan(k=7)) == pytest.approx(1.7 + 0.6 * 7 / 3, rel=0.05)
    measure(costs, {7: 2.5}, context=33_000)
    assert costs.steps(Plan(k=7)) == pytest.approx(2.5, rel=0.05)
    costs.reach(100)
    assert costs.steps(Plan(k=7)) == pytest.approx(1.7, rel=0.05)


def test_a_mixtures_rows_cost_less_and_less():
    """256 experts, 8 a token: sixteen rows use 102 of them, not 128."""
    costs = Costs()
    costs.growth = mixture(256, 8)
    measure(costs, {0: 1.0, 1: 2.0})
    expected = (256 * (1 - (1 - 8 / 256) ** 16) - 8) / (256 * (1 - (1 - 8 / 256) ** 2) - 8)
    assert (costs.steps(Plan(k=15)) - 1) / (costs.steps(Plan(k=1)) - 1) == pytest.approx(expected)
