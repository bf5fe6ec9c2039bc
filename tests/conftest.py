"""Load tiny checkpoints once per session, and make many small tests fast."""

import contextlib
import gc
import importlib
import os
import shutil
import sys
from functools import partial

# Write bytecode even where PYTHONDONTWRITEBYTECODE is set: otherwise each worker of each run rewrites the assertions
# of all test files, and each process that a test starts compiles the package.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Before MLX, NumPy or PyTorch is imported, here or in a test's process: one small product is slower on more threads.
for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")
# In the tests' processes, as `pytest_runtest_setup` in this one: a CPU's fused kernels each need a C++ compiler.
if sys.platform == "linux":
    os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
# Each worker runs on one core, shared by MLX's thread and Python's: switching between cores took a third of the time.
if (_worker := os.environ.get("PYTEST_XDIST_WORKER")) and hasattr(os, "sched_setaffinity"):
    with contextlib.suppress(OSError):
        _cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {_cores[int(_worker.removeprefix("gw")) % len(_cores)]})
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# Files of the tests are in memory where there is room: on a disk, renames and overwrites wait for it.
with contextlib.suppress(OSError):
    if os.access("/dev/shm", os.W_OK) and shutil.disk_usage("/dev/shm").free > 4 << 30:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

import hypothesis
import mlx.core as mx
import pytest
from compile_mode import ENABLED, NO_FUSE, set_mode

import mlx_mtp

# A busy machine is slow, and no example is wrong for it.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")


def pytest_collection_finish():
    """Exclude imported objects from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Run neighbouring tests on the same worker, which then creates their shared fixtures once."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.option.dist == "load" else None


@pytest.fixture(autouse=True)
def _seeded():
    mx.random.seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """`mx.compile` records, replays and fuses nothing: on a CPU a C++ compiler takes half a second for a kernel."""
    set_mode(ENABLED if mx.metal.is_available() else NO_FUSE)


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_fused_behind_the_emulator():
    """`mx.enable_compile`, which ends a block of `emulated`, returns to the mode of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        if not mx.metal.is_available():
            patch.setattr(mx, "enable_compile", partial(set_mode, NO_FUSE))
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_cache_directory(tmp_path_factory):
    """Use a cache directory of the tests' own: neither reads nor writes the user's measurements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_MTP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _quick_loads():
    import quick_loads  # as late as `tiny` below

    with pytest.MonkeyPatch.context() as patch:
        quick_loads.shorten(patch)
        yield


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """(seed, config changes) -> (our model, mlx-lm's plain model) of one random checkpoint."""
    import tiny  # and with it mlx-lm, for which xdist's controller would keep the workers waiting

    built = {}

    def build(seed: int = 0, **changes):
        key = (seed, repr(sorted(changes.items())))
        if key not in built:
            config = {**tiny.CONFIG, **tiny.SHORTER, **changes}
            weights = tiny.random_weights(config, seed=seed)
            path = tiny.save(tmp_path_factory.mktemp("checkpoint"), config, weights)
            built[key] = mlx_mtp.load_model(path), tiny.plain_model(config, weights)
        return built[key]

    return build


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Every second worker collects from the end: each then compiles half of the files, and reads the other half's."""
    report = yield
    if (_worker or "").endswith(("1", "3", "5", "7", "9")) and isinstance(collector, pytest.Directory):
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)  # before items are grouped by their fixtures
def pytest_collection_modifyitems(config, items):
    items.sort(key=lambda item: item.path)  # the same order on all workers
    if "timing" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if "timing" in item.keywords])
        items[:] = [item for item in items if "timing" not in item.keywords]
    if mx.metal.is_available():
        return
    skip = pytest.mark.skip(reason="needs a Mac GPU; this machine has no Metal")
    for item in items:
        if item.get_closest_marker("metal"):  # keywords have the names of folders too
            item.add_marker(skip)


@pytest.fixture
def on_paper(monkeypatch):
    """Kernels are chosen and recorded in graphs, and nothing is computed."""
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.fixture
def own_cache(monkeypatch, tmp_path):
    """Return the test's own empty cache directory, without what earlier tests have measured."""
    monkeypatch.setenv("MLX_MTP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def recorded_at_once(monkeypatch):
    """A cycle is recorded when it first occurs."""
    monkeypatch.setattr("mlx_mtp.decoding.replay.OFTEN", 1)


@pytest.fixture
def quick_trials(monkeypatch):
    """A trial compares one draw of one layer."""
    monkeypatch.setattr("mlx_mtp.tuning.ab_test.DRAWS", 1)
    monkeypatch.setattr("mlx_mtp.tuning.ab_test.LAYERS", 1)


@pytest.fixture
def machine(monkeypatch):
    """Return a function that sets the bytes of memory that are available."""
    memory = importlib.import_module("mlx_mtp.machine.memory")
    monkeypatch.delenv(memory.IGNORE, raising=False)
    return lambda size: monkeypatch.setattr(memory, "available", lambda: memory.Available(int(size), "a test"))


@pytest.fixture
def letters_as_tokenizer(monkeypatch):
    """Make `generate` accept `Letters` as a tokenizer."""
    from letters import Letters  # as late as `tiny` above

    monkeypatch.setattr(sys.modules["mlx_mtp.generate"], "TokenizerWrapper", Letters)
