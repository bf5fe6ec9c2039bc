"""What was measured or found in one lane is not used in another: costs, kernel trials and checked rows."""

import itertools

import mlx.nn as nn
import pytest
from lanes import LANES, lanes_apart

from mlx_mtp.decoding.policy import control_for, remember
from mlx_mtp.decoding.row_check import RowCheck, check_rows
from mlx_mtp.layers.runtime import Runtime
from mlx_mtp.tuning.kernel_switch import ModelTrials
from mlx_mtp.tuning.plan import PLAIN, Plan
from mlx_mtp.tuning.verdict_file import TrialFinding

pytestmark = [
    pytest.mark.usefixtures("own_cache"),
    pytest.mark.parametrize(("made", "used"), [*itertools.product(LANES, LANES)]),
]


def test_costs(made, used):
    """Costs in memory of this process, and in the file for the next one."""
    options = {"adaptive": True, "p_min": False}
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)  # the other stands for the next process
    for each, lane in ((model, made), (other, used)):
        each.runtime, each.ranks, each.windows = Runtime(lane=lane), None, list
    control = control_for(model, 1, 0, **options)
    for _ in range(9):
        control.costs.observe(PLAIN, 0.02)
        control.costs.observe(Plan("heads", 1), 0.05)
    remember(model, control)
    model.runtime.lane = used
    for again in (model, other):
        steps = control_for(again, 1, 0, **options).costs.steps(Plan("heads", 1))
        assert (steps == pytest.approx(2.5, rel=0.05)) == (used == made)


def test_kernel_trials(tiny_models, made, used):
    model, found = tiny_models()[0], {("op", "shape", 4): TrialFinding("wrong", None)}
    with lanes_apart(model):
        model.runtime.lane = made
        ModelTrials(model, []).remembered.add(found)
        model.runtime.lane = used
        assert ModelTrials(model, []).remembered.recall() == (found if used == made else {})


def test_checked_rows(tiny_models, made, used):
    """Also in a check that exists when the lane changes."""
    model = tiny_models()[0]
    with lanes_apart(model), pytest.MonkeyPatch.context() as patch:
        for name in ("row_check", "rows"):
            patch.setattr(model.runtime, name, None)
        model.runtime.lane = made
        found = check_rows(model, contexts=(1,), exact=False)
        model.runtime.lane = used
        model.runtime.row_check.renew()
        later = RowCheck(model, {}, (1,), exact=False, recalls=True)
        assert [model.runtime.row_check.found, later.found] == ([found] * 2 if used == made else [{}] * 2)
