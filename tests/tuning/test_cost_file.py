"""Store the costs of cycles between runs: which file is used, damaged files, read-only directories."""

import json
import math
import warnings
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mtp.decoding.policy import control_for, remember
from mlx_mtp.layers.runtime import Runtime
from mlx_mtp.machine import remembered
from mlx_mtp.tuning import cost_file
from mlx_mtp.tuning.cost_file import RememberedCosts
from mlx_mtp.tuning.costs import Costs
from mlx_mtp.tuning.plan import PLAIN, Plan
from mlx_mtp.tuning.replay_choice import CompileChoice

MEASURED = {PLAIN: 0.02, Plan("heads", 1): 0.024, Plan("heads", 1, stepwise=True): 0.031, Plan("lookup", 7): 0.06}


@pytest.fixture(autouse=True)
def directory(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_MTP_CACHE", str(tmp_path / "a" / "cache"))
    monkeypatch.setattr(remembered, "_warned", set())
    return tmp_path / "a" / "cache" / "costs"


def measured() -> Costs:
    costs = Costs()
    for plan, seconds in MEASURED.items():
        for _ in range(9):
            costs.observe(plan, seconds)
    return costs


def test_kept_costs_are_recalled(directory):
    costs = measured()
    RememberedCosts("m", "auto").keep(costs)
    known = RememberedCosts("m", "auto").recall()
    assert known is not None
    for plan in MEASURED:
        assert math.isclose(known.steps(plan), costs.steps(plan), rel_tol=1e-3)
    assert len(list(directory.iterdir())) == 1


def test_costs_of_every_context_are_recalled():
    costs = measured()
    costs.reach(32_000)
    for _ in range(20):
        costs.observe(Plan("heads", 1), 0.03)
    RememberedCosts("m", "auto").keep(costs)
    known = RememberedCosts("m", "auto").recall()
    for context in (0, 32_000, 0):
        costs.reach(context)
        known.reach(context)
        assert math.isclose(known.steps(Plan("heads", 1)), costs.steps(Plan("heads", 1)), rel_tol=1e-3)


def test_without_a_file_there_are_no_costs():
    assert RememberedCosts("m", "auto").recall() is None


def test_another_model_setting_version_or_machine_has_other_costs(monkeypatch):
    RememberedCosts("m", "auto").keep(measured())
    assert RememberedCosts("n", "auto").recall() is None
    assert RememberedCosts("m", "off").recall() is None
    for name in ("MLX_VERSION", "__version__"):
        with monkeypatch.context() as changed:
            changed.setattr(cost_file, name, "9.9.9")
            assert RememberedCosts("m", "auto").recall() is None
    with monkeypatch.context() as changed:
        changed.setattr(mx, "device_info", lambda: {"device_name": "another"})
        assert RememberedCosts("m", "auto").recall() is None
    for name in ("LD_PRELOAD", "OPENBLAS_NUM_THREADS"):
        with monkeypatch.context() as changed:
            changed.setenv(name, "3")
            assert RememberedCosts("m", "auto").recall() is None
    assert RememberedCosts("m", "auto").recall() is not None


def changed(**values):
    return lambda kept: json.dumps({**kept, **values})


def costs(seconds, catch_up=0.01):
    return changed(costs={"octaves": {"0": seconds}, "catch_up": catch_up})


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: "",
        lambda kept: json.dumps(kept)[:-9],
        lambda kept: "[]",
        lambda kept: "\udcff",
        changed(format=0),
        changed(facts={}),
        changed(costs=None),
        changed(costs={}),
        costs([["heads", 0]]),
        costs([["heads", 0, "0.1"]]),
        costs([["heads", 0, -0.1]]),
        costs([["heads", 0, float("nan")]]),
        costs([["heads", 0.5, 0.1]]),
        costs([["heads", 10**9, 0.1]]),
        costs([["feet", 0, 0.1]]),
        costs([[["heads"], 0, 0.1]]),
        costs([["heads", 0, 0.1], ["heads", 1, 2.1]]),
        costs([["heads", 0, 0.1]], catch_up=None),
        costs([["heads", 0, 0.1]], catch_up=-1.0),
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(directory, damage):
    memory = RememberedCosts("m", "auto")
    memory.keep(measured())
    (file,) = directory.iterdir()
    file.write_text(damage(json.loads(file.read_text())), errors="surrogateescape")
    assert memory.recall() is None
    memory.keep(measured())
    assert memory.recall() is not None


def test_a_file_of_another_model_under_the_name_is_ignored(directory):
    RememberedCosts("n", "auto").keep(measured())
    (foreign,) = directory.iterdir()
    own = remembered.file_of(directory, RememberedCosts("m", "auto").facts)
    foreign.rename(own)
    assert RememberedCosts("m", "auto").recall() is None


def test_a_directory_that_cannot_be_written_is_one_warning(directory):
    directory.parent.mkdir(parents=True)
    directory.write_text("a file")
    with pytest.warns(UserWarning, match=r"cannot be kept for the next run \(.*costs"):
        RememberedCosts("m", "auto").keep(measured())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RememberedCosts("m", "auto").keep(measured())
    assert RememberedCosts("m", "auto").recall() is None


def test_trials_and_costs_do_not_share_a_directory(directory):
    assert remembered.cache_directory("trials") == directory.parent
    assert remembered.cache_directory("costs") == directory


def test_what_replayed_cycles_cost_is_kept_apart(directory):
    replays = SimpleNamespace(choice=CompileChoice(True), decided=lambda: False)
    options = {"adaptive": True, "p_min": False}
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)  # the other stands for the next process
    for each in (model, other):
        each.runtime, each.ranks, each.windows = Runtime(), None, list
    for compiled, seconds in ((None, 0.03), (replays, 0.05)):
        control = control_for(model, 1, 0, compiled=compiled, **options)
        for _ in range(9):
            control.costs.observe(PLAIN, 0.02)
            control.costs.observe(Plan("heads", 1), seconds)
        remember(model, control, compiled)
    for again in (model, other):
        known = [control_for(again, 1, 0, compiled=c, **options).costs for c in (None, replays)]
        assert [costs.steps(Plan("heads", 1)) for costs in known] == pytest.approx([1.5, 2.5], rel=0.05)
