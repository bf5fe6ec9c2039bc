"""Run kernel trials while the model is idle; kernels change only between answers."""

import threading
from dataclasses import dataclass

import mlx.core as mx
import pytest
from mlx import nn

from mlx_mtp.decoding.policy import learned
from mlx_mtp.layers.runtime import HasRuntime, Runtime
from mlx_mtp.tuning.idle_trials import IdleTrials


@dataclass
class Report:
    kernels: tuple = ("before",)
    not_exact: tuple = ("all",)


class Trials:
    """Trials that run until they are stopped. events: (action, whether in the main thread)."""

    def __init__(self, found="after", left=True):
        self.found, self.left, self.events, self.began = found, left, [], threading.Event()

    def needed(self):
        return []

    def has_untried(self, _):
        return self.left

    def try_rest(self, stop):
        self.events.append(("tried", threading.current_thread() is threading.main_thread()))
        self.began.set()
        while not stop():
            threading.Event().wait(0.001)
        if isinstance(self.found, Exception):
            raise self.found

    def apply(self):
        self.events.append(("switched", threading.current_thread() is threading.main_thread()))
        return (self.found,), ()


class Model(HasRuntime, nn.Module):
    def __init__(self, trials):
        super().__init__()
        self.runtime = Runtime(report=Report(), trials=trials)
        self._freqs = mx.arange(4) * 2.0


def test_kernels_change_on_exit_in_the_thread_that_generates():
    model = Model(trials := Trials())
    with IdleTrials(model) as idle:
        assert trials.began.wait(10)
        assert trials.events == [("tried", False)]
    assert trials.events == [("tried", False), ("switched", True)]
    assert not idle.thread.is_alive()
    assert model.report == Report(("after",), ())


def test_lazy_arrays_of_the_model_can_be_read_in_the_thread(monkeypatch):
    model = Model(trials := Trials())
    monkeypatch.setattr(trials, "try_rest", lambda stop: trials.events.append((model._freqs + 1).tolist()))
    with IdleTrials(model):
        pass
    assert trials.events[0] == [1, 3, 5, 7]


@pytest.mark.parametrize("found", ["before", "after"])
def test_new_kernels_drop_the_costs(found):
    model = Model(Trials(found=found))
    before = learned(model)
    with IdleTrials(model):
        pass
    assert model.report.kernels == (found,)
    assert (learned(model) is before) == (found == "before")
    assert learned(model) is learned(model)


@pytest.mark.parametrize("trials", [None, Trials(left=False)])
def test_without_remaining_trials_no_thread_starts(trials):
    with IdleTrials(Model(trials)) as idle:
        assert idle.thread is None
    assert not trials or trials.events == []


def test_a_failure_of_stock_mlx_ends_the_trials():
    model = Model(Trials(found=RuntimeError("[malloc] Unable to allocate")))
    with (
        pytest.warns(UserWarning, match=r"^no more kernels are tried: RuntimeError: \[malloc\] Unable"),
        IdleTrials(model),
    ):
        pass
    assert model.runtime.trials is None
