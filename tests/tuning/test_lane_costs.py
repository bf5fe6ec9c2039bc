"""What ops cost in both lanes: which kernels and formats are timed, and which products the lane `matrix` has."""

import math

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mtp.layers.products import Dense, Stack, VerifyRouter
from mlx_mtp.tuning import lane_costs
from mlx_mtp.tuning.lane_sites import in_matrix

PRODUCTS = [Dense(nn.Linear(8, 8))]


class Op:
    """A site whose ops return their names, at most one of which fails."""

    width, every_count, shape, kind, weights_read = 8, (2, 4, 8), "s", "", 1

    def __init__(self, name="ours", fails=""):
        self.name, self.fails = name, fails

    def stock(self, x):
        return self._run("stock", x)

    def ours(self, x):
        return self._run(self.name, x)

    def _run(self, name, x):
        if name == self.fails:
            raise RuntimeError("no such function")
        return [x]


@pytest.mark.parametrize("fails", ["", "ours", "matrix"])
def test_an_op_costs_what_its_fastest_kernel_does(monkeypatch, fails):
    """Rows above four may be split, which costs at most two launches; a kernel that fails is not timed."""
    seconds, budgets = {"stock": 3.0, "ours": 2.0, "matrix": 1.0}, []

    def chain_times(sides, budget):
        budgets.append(budget)
        names = [("stock" if ops[0].__name__ == "stock" else ops[0].__self__.name, len(x)) for ops, x in sides]
        assert len({*names}) == len(names)
        return [seconds[name] * (m if m < 8 else 3 * m) * (9 if (name, m) == ("ours", 2) else 1) for name, m in names]

    monkeypatch.setattr(lane_costs, "chain_times", chain_times)
    monkeypatch.setattr(lane_costs, "in_matrix", lambda site: Op("matrix", fails))
    found = lane_costs.op_seconds([Op(fails=fails)] * 3, (1, 2, 4, 8), mx.float32, 0.5)
    each = 3.0 if fails == "ours" else 2.0
    assert found["exact"] == {1: 3.0, 2: 2 * 3.0, 4: 4 * each, 8: 8 * each}
    ours = math.inf if fails == "matrix" else 1.0
    assert found["matrix"] == {1: ours, 2: 2 * ours, 4: 4 * ours, 8: 24 * ours}
    assert budgets == [0.125] * 4  # each number of rows has chains of its own length


@pytest.mark.parametrize(("width", "groups"), [(64, [[[64]], [[64]], [[8]]]), (4096, [[[4096], [64]], [[8]]])])
def test_formats_of_few_weights_are_not_timed(width, groups):
    formats = [(width, 4), (64, 8)]
    sites = [Stack([nn.QuantizedLinear(k, 64, bias=False, group_size=32, bits=bits)]) for k, bits in formats]
    timed = lane_costs._groups([*sites, *PRODUCTS])
    assert [[[site.width for site in same] for same in shapes] for shapes in timed] == groups


def test_routers_stay_in_the_lane_exact():
    (dense,), router = PRODUCTS, nn.Linear(8, 8)
    router.__class__ = type("Router", (VerifyRouter, nn.Linear), {})
    assert in_matrix(Dense(router)) is None
    assert in_matrix(dense).op == "matrix_gemv"
