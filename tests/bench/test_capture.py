"""Check `bench profile --capture`: a trace covers one phase of some cycles, and errors name what prevents it."""

from contextlib import contextmanager

import command_line
import mlx.core as mx
import pytest

from mlx_mtp.bench import census
from mlx_mtp.bench.profile import Timer, Workload

PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 0]


class Metal:
    """Records what is evaluated while a trace is open."""

    def __init__(self, monkeypatch):
        self.open, self.files, self.seen = None, [], {}
        monkeypatch.setattr(mx.metal, "is_available", lambda: True)
        monkeypatch.setattr(mx.metal, "start_capture", self.start)
        monkeypatch.setattr(mx.metal, "stop_capture", self.stop)

    def start(self, path):
        assert self.open is None
        self.open = path
        self.files.append(path)

    def stop(self):
        assert self.open
        open(self.open, "w").close()
        self.open = None


@pytest.mark.parametrize(("phase", "cycles"), [("draft", 1), ("verify", 2), ("accept", 2), ("prefill", 1)])
def test_a_trace_covers_one_phase_of_some_cycles(tiny_models, monkeypatch, tmp_path, phase, cycles):
    metal, evaluated = Metal(monkeypatch), []
    real = Timer.evaluate

    def evaluate(self, name, caches, *arrays):
        real(self, name, caches, *arrays)
        evaluated.append((name, self.cycles))

    monkeypatch.setattr(Timer, "evaluate", evaluate)
    inside, during = [], Timer.during

    @contextmanager
    def noted(self, name):
        if metal.open:
            inside.append((name, self.cycles))
        with during(self, name):
            yield

    monkeypatch.setattr(Timer, "during", noted)
    files = census.capture(Workload(tiny_models()[0], PROMPT, 12, 3, 64), phase, tmp_path / "a.gputrace", cycles)
    assert [str(f) for f in files] == metal.files
    assert len(files) == cycles
    assert metal.open is None
    first = 0 if phase == "prefill" else census.WARM
    assert inside == [(phase, first + i) for i in range(cycles)]


def test_a_trace_is_closed_after_a_failure(tiny_models, monkeypatch, tmp_path):
    metal = Metal(monkeypatch)
    watch = census.Captured(phase="prefill", paths=[tmp_path / "a.gputrace"])
    with pytest.raises(KeyboardInterrupt), watch.during("prefill"):
        raise KeyboardInterrupt
    assert metal.open is None


def test_errors_name_what_prevents_a_trace(monkeypatch, tmp_path):
    path = tmp_path / "a.gputrace"
    with pytest.raises(ValueError, match="needs a Metal GPU"):
        census.check_capture("verify", path, 1)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.delenv(census.VARIABLE, raising=False)
    with pytest.raises(ValueError, match="has MTL_CAPTURE_ENABLED=1"):
        census.check_capture("verify", path, 1)
    monkeypatch.setenv(census.VARIABLE, "1")
    census.check_capture("verify", path, 2)
    with pytest.raises(ValueError, match=r"a\.txt: must end in \.gputrace"):
        census.check_capture("verify", tmp_path / "a.txt", 1)
    with pytest.raises(ValueError, match="allowed is 1 with --capture prefill"):
        census.check_capture("prefill", path, 2)
    (tmp_path / "a-2.gputrace").mkdir()
    with pytest.raises(ValueError, match=r"a-2\.gputrace: exists"):
        census.check_capture("verify", path, 2)


@pytest.mark.skipif(mx.metal.is_available(), reason="off Metal")
def test_a_trace_without_metal_is_an_error():
    done = command_line.call("bench", "profile", "--capture", "verify")
    assert done.returncode == 2
    assert done.stderr.startswith("error: Invalid value for '--capture': capture=verify: needs a Metal GPU")
    assert done.stderr.count("\n") == 1
