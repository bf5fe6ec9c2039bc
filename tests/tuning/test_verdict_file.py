"""Store findings of trials for one machine, MLX version, set of kernels and model."""

import json
import shutil
import threading
import warnings
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mtp.kernels import _source
from mlx_mtp.machine import remembered
from mlx_mtp.machine.remembered import cache_directory
from mlx_mtp.tuning import verdict_file
from mlx_mtp.tuning.kernel_trials import KernelTrial, decide
from mlx_mtp.tuning.verdict_file import RememberedVerdicts, TrialFinding

FOUND = {
    ("qmm", "a", 2): TrialFinding(None, 1.0),
    ("qmm", 'b "Ä"', 8): TrialFinding("row 1 of 8 differs", None),
    ("head", "a", 2): TrialFinding(None, 1 / 3, split=True),
}


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_MTP_CACHE", str(tmp_path / "a" / "cache"))
    monkeypatch.setattr(remembered, "_warned", set())
    return tmp_path / "a" / "cache"


def written(directory):
    (file,) = directory.iterdir()
    return file


def trials(run=lambda x: [x]):
    return [KernelTrial("qmm", "a", m, [(run, lambda x: [x])], 4, mx.float32) for m in (2, 3)]


def never(_):
    raise AssertionError("run")


def test_findings_come_back(directory):
    assert RememberedVerdicts("m").recall() == {}
    assert not directory.exists()  # nothing is written before something is found
    RememberedVerdicts("m").keep(FOUND)
    assert RememberedVerdicts("m").recall() == FOUND
    assert written(directory).suffix == ".json"


def test_a_second_decision_runs_nothing(directory):
    first = decide(trials(), lane=None, timer=lambda t: 1.5 / t.rows, remembered=RememberedVerdicts("m"))
    file = written(directory).stat().st_ino
    assert decide(trials(never), lane=None, timer=never, remembered=RememberedVerdicts("m"), budget=0) == first
    assert written(directory).stat().st_ino == file  # nor does it write
    assert [str(v) for v in first.values()] == ["off: slower, 0.75x", "off: slower, 0.50x"]


def test_a_wrong_kernel_is_stored_too():
    with pytest.warns(UserWarning, match="is wrong"):
        first = decide(trials(lambda x: [x + 1]), lane=None, timer=never, remembered=RememberedVerdicts("m"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decide(trials(never), lane=None, timer=never, remembered=RememberedVerdicts("m")) == first
    assert not any(v.on for v in first.values())


def test_a_kernel_that_lacked_memory_is_tried_again():

    def short(_):
        raise RuntimeError("[malloc] Unable to allocate")

    with pytest.warns(UserWarning, match="Unable to allocate"):
        first = decide(trials(short), lane=None, timer=never, remembered=RememberedVerdicts("m"))
    assert not any(verdict.on for verdict in first.values())
    second = decide(trials(), lane=None, timer=lambda t: 2.0, remembered=RememberedVerdicts("m"))
    assert all(verdict.on for verdict in second.values())


def test_the_next_load_makes_the_remaining_trials():
    def times(ratio):
        return lambda t: ratio if t.rows == 2 else never(t)

    first = decide(trials(), lane=None, timer=times(2.0), remembered=RememberedVerdicts("m"))
    assert [str(v)[:20] for v in first.values()] == ["on, 2.00x", "off: timing it fails"]
    none = decide(trials(never), lane=None, timer=never, remembered=RememberedVerdicts("m"), budget=0)
    assert [str(v)[:14] for v in none.values()] == ["on, 2.00x", "off: not tried"]
    last = decide(trials(), lane=None, timer=lambda t: float(t.rows), remembered=RememberedVerdicts("m"))
    assert [str(v) for v in last.values()] == ["on, 2.00x", "on, 3.00x"]  # the first was not timed again
    assert len(RememberedVerdicts("m").recall()) == 2


@pytest.mark.parametrize("lane", ["off", "exact", "matrix"])
def test_requested_kernels_are_not_stored(directory, lane):
    decide(trials(), lane=lane, timer=never, remembered=RememberedVerdicts("m"))
    assert not directory.exists()
    RememberedVerdicts("m").keep({("qmm", "a", 2): TrialFinding("wrong", None)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decide(trials(), lane=lane, remembered=RememberedVerdicts("m"))[("qmm", "a", 2)].on == (lane != "off")


def test_another_model_mlx_or_version_is_tried_again(monkeypatch):
    RememberedVerdicts("m").keep(FOUND)
    assert RememberedVerdicts("n").recall() == {}
    for name in ("MLX_VERSION", "__version__"):
        with monkeypatch.context() as changed:
            changed.setattr(verdict_file, name, "9.9.9")
            assert RememberedVerdicts("m").recall() == {}
    assert RememberedVerdicts("m").recall() == FOUND


def test_another_machine_is_tried_again(monkeypatch):
    RememberedVerdicts("m").keep(FOUND)
    device = mx.device_info()
    for name in ("device_name", "architecture", "memory_size"):
        with monkeypatch.context() as changed:
            changed.setattr(mx, "device_info", lambda name=name: {**device, name: "another"})
            assert RememberedVerdicts("m").recall() == {}
    for name in ("system", "release"):
        with monkeypatch.context() as changed:
            changed.setattr("platform." + name, lambda: "another")
            assert RememberedVerdicts("m").recall() == {}
    assert RememberedVerdicts("m").recall() == FOUND


def test_changed_kernels_are_tried_again(monkeypatch, tmp_path):
    sources, launches = tmp_path / "sources", tmp_path / "launches"
    shutil.copytree(Path(_source.__file__).parent, launches, ignore=shutil.ignore_patterns("__pycache__", "metal"))
    (sources / "more").mkdir(parents=True)
    (sources / "op.metal").write_text("a")
    (sources / "more" / "op.h").write_text("b")
    monkeypatch.setattr(_source, "DIRECTORY", sources)
    monkeypatch.setattr(_source, "__file__", str(launches / "_source.py"))
    RememberedVerdicts("m").keep(FOUND)
    for file in (sources / "op.metal", sources / "more" / "op.h", launches / "_source.py", launches / "new.py"):
        before = file.read_text() if file.exists() else None
        file.write_text("c")
        assert RememberedVerdicts("m").recall() == {}, file
        file.unlink() if before is None else file.write_text(before)
        assert RememberedVerdicts("m").recall() == FOUND, file
    (sources / "op.metal").rename(sources / "op2.metal")
    assert RememberedVerdicts("m").recall() == {}


def changed(**values):
    return lambda kept: json.dumps({**kept, **values})


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: "",
        lambda kept: json.dumps(kept)[:-9],
        lambda kept: "[]",
        lambda kept: "3",
        lambda kept: "[" * 100_000,
        lambda kept: "\udcff",
        lambda kept: json.dumps({"format": kept["format"], "facts": kept["facts"]}),
        changed(format=0),
        changed(facts={}),
        changed(found=None),
        changed(found=[["qmm", "a", 2, None, False]]),
        changed(found=[["qmm", "a", "2", None, 1.5, False]]),
        changed(found=[["qmm", "a", 2, None, None, False]]),
        changed(found=[["qmm", "a", 2, "wrong", 1.5, False]]),
        changed(found=[["qmm", "a", 2, None, "1.5", False]]),
        changed(found=[["qmm", "a", 2, None, float("nan"), False]]),
        changed(found=[["qmm", "a", 2, None, -1.0, False]]),
        changed(found=[["qmm", "a", 2, 1, None, False]]),
        changed(found=[[["qmm"], "a", 2, None, 1.5, False]]),
        changed(found=[["qmm", "a", True, None, 1.5, False]]),
        changed(found=[["qmm", "a", 2, None, 1.5]]),
        changed(found=[["qmm", "a", 2, None, 1.5, 1]]),
        changed(spellings=[]),
        changed(spellings=3),
        changed(spellings={"qmm": "SPELT"}),
        changed(spellings={"qmm": ["FUSED"]}),
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(directory, damage):
    RememberedVerdicts("m").keep(FOUND)
    file = written(directory)
    file.write_text(damage(json.loads(file.read_text())), errors="surrogateescape")
    assert RememberedVerdicts("m").recall() == {}
    assert all(
        v.on for v in decide(trials(), lane=None, timer=lambda _: 2.0, remembered=RememberedVerdicts("m")).values()
    )
    assert RememberedVerdicts("m").recall() == dict.fromkeys(
        [("qmm", "a", 2), ("qmm", "a", 3)], TrialFinding(None, 2.0)
    )


def test_a_file_of_another_model_under_the_name_is_ignored(directory):
    RememberedVerdicts("n").keep(FOUND)
    foreign = written(directory)
    RememberedVerdicts("m").keep({})
    (own,) = set(directory.iterdir()) - {foreign}
    shutil.copy(foreign, own)
    assert RememberedVerdicts("m").recall() == {}


def test_a_directory_that_cannot_be_written_is_a_warning(directory):
    directory.parent.mkdir()
    directory.write_text("a file")
    with pytest.warns(UserWarning, match=r"cannot be kept for the next load \(.*cache"):
        verdicts = decide(trials(), lane=None, timer=lambda _: 2.0, remembered=RememberedVerdicts("m"))
    assert all(v.on for v in verdicts.values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the warning appears once
        RememberedVerdicts("m").keep(FOUND)


def test_a_write_that_fails_leaves_the_old_file(directory, monkeypatch):
    RememberedVerdicts("m").keep(FOUND)
    file = written(directory)

    def full(*_):
        raise OSError("no space left")

    with monkeypatch.context() as changed:
        changed.setattr("os.replace", full)
        with pytest.warns(UserWarning, match="no space left"):
            RememberedVerdicts("m").keep({})
    assert written(directory) == file  # and no other file
    assert RememberedVerdicts("m").recall() == FOUND


def test_writers_and_readers_at_once(directory):
    sets = [{("qmm", "a" * 1000 * i, m): TrialFinding(None, float(i + 1)) for m in range(20)} for i in range(3)]
    RememberedVerdicts("m").keep(sets[0])
    writers = [
        threading.Thread(target=lambda found=found: [RememberedVerdicts("m").keep(found) for _ in range(15)])
        for found in sets
    ]
    for writer in writers:
        writer.start()
    seen = [RememberedVerdicts("m").recall()]
    while any(writer.is_alive() for writer in writers):
        seen.append(RememberedVerdicts("m").recall())
    assert all(found in sets for found in seen)
    assert written(directory)


def test_the_directory_of_findings(monkeypatch, tmp_path):
    assert cache_directory() == tmp_path / "a" / "cache"
    monkeypatch.setenv("MLX_MTP_CACHE", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "mlx_mtp" / "trials"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for system, place in (("darwin", "Library/Caches"), ("linux", ".cache")):
        monkeypatch.setattr("sys.platform", system)
        assert cache_directory() == tmp_path / "home" / place / "mlx_mtp" / "trials"
    monkeypatch.setenv("MLX_MTP_CACHE", "~/here")
    assert cache_directory() == tmp_path / "home" / "here"


def test_no_home_is_a_warning(monkeypatch):
    def homeless(*_):
        raise RuntimeError("Could not determine home directory.")

    for name in ("MLX_MTP_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    assert RememberedVerdicts("m").recall() == {}
    with pytest.warns(UserWarning, match="cannot be kept for the next load .*home"):
        RememberedVerdicts("m").keep(FOUND)
