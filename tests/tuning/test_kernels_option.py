"""`kernels=`, `--kernels` and MLX_MTP_KERNELS reach `switch_on`, and the report shows what it did."""

import importlib
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from sweep import sampled

import mlx_mtp
from mlx_mtp.cli import main, progress
from mlx_mtp.decoding.memory_needs import Budget
from mlx_mtp.demo import demo_path
from mlx_mtp.kernels import _source
from mlx_mtp.machine.progress import report_progress

LINES = ("verify_qmm 64x64 4-bit: M=2-5 on (1.31-1.80x)", "verify_qmm 64x32 4-bit: M=2-8 off (slower)")
ROWS = f"""\
kernels    {LINES[0]}
           {LINES[1]}
not exact  router, head: bits may depend on the number of rows
"""


@pytest.fixture
def asked(monkeypatch):
    """Record the lanes that `switch_on` is called with."""
    lanes = []
    monkeypatch.delenv("MLX_MTP_KERNELS", raising=False)
    monkeypatch.setattr(
        importlib.import_module("mlx_mtp.checkpoint.load"),
        "switch_on",
        lambda model, lane, lazy: lanes.append((lane, lazy) if lazy else lane) or (LINES, ("router", "head")),
    )
    return lanes


@pytest.fixture
def unread(monkeypatch):
    """Make loading an error."""
    monkeypatch.setattr(importlib.import_module("mlx_mtp.checkpoint.load"), "_load", lambda *_, **__: 1 / 0)


def invoke(*arguments, **env):
    return CliRunner().invoke(main, arguments, input="q\n", env=env, standalone_mode=True)


def test_the_report_shows_the_lines_of_switch_on(asked):
    model = mlx_mtp.load_model(demo_path(), kernels="exact")
    assert asked == ["exact"]
    assert (model.report.kernels, model.report.not_exact) == (LINES, ("router", "head"))
    assert ROWS.strip() in str(model.report)
    bare = replace(model.report, kernels=(), not_exact=())
    assert str(model.report) == f"{bare}\n{ROWS.strip()}"
    listed = str(replace(model.report, ignored=("vision.*",)))
    assert listed.endswith(f"{ROWS}not used   vision.*")


def test_long_lines_are_broken(asked):
    line = "verify_qmm 12288+1024+1024+96x4096 4-bit affine g64 bfloat16: M=1-4 on (1.37-1.86x), M=5-6 off (slower)"
    report = replace(mlx_mtp.load_model(demo_path()).report, kernels=(line, LINES[0]))
    first, second, third = str(report).splitlines()[-4:-1]
    assert max(map(len, (first, second, third))) <= 100
    assert (first[:11], second[:15], third) == ("kernels    ", " " * 15, " " * 11 + LINES[0])
    assert f"{first[11:]} {second.strip()}" == line


def test_lazy_weights_are_not_read_for_a_trial(asked):
    for kernels in (None, "exact"):
        mlx_mtp.load_model(demo_path(), lazy=True, kernels=kernels)
    assert asked == [(None, True), ("exact", True)]


ASKED = [
    ("generate", [], {}, None),
    ("generate", ["--kernels", "off", "--report"], {"MLX_MTP_KERNELS": "exact"}, "off"),
    ("chat", ["--kernels", "matrix"], {}, "matrix"),
    ("chat", [], {"MLX_MTP_KERNELS": "exact"}, "exact"),
]


@pytest.mark.parametrize(("command", "arguments", "env", "lane"), sampled(ASKED[1::2], ASKED))
def test_the_flag_and_the_variable(asked, command, arguments, env, lane):
    result = invoke(command, "-m", "1", *arguments, **env)
    assert result.exit_code == 0, result.output
    assert asked == [lane]
    assert (ROWS in result.output) == ("--report" in arguments)


def test_mistakes_are_found_before_anything_is_loaded(unread):
    for arguments, env, message in (
        (["--kernels", "on"], {}, "'--kernels': 'on' is not one of"),
        ([], {"MLX_MTP_KERNELS": "on"}, "error: MLX_MTP_KERNELS=on: allowed are off, exact, matrix"),
    ):
        result = invoke("generate", *arguments, **env)
        assert (result.exit_code, message in result.output) == (2, True), result.output
    for load in (mlx_mtp.load, mlx_mtp.load_model):
        with pytest.raises(ValueError, match=r"^kernels=on: allowed are off, exact, matrix$"):
            load("/no/such/place", kernels="on")


def test_help_names_the_option():
    for command in ("generate", "chat"):
        assert "--kernels [off|exact|matrix]" in invoke(command, "--help").output


@pytest.mark.skipif(_source.on_metal(), reason="expects no Metal GPU")
def test_without_metal():
    report = mlx_mtp.load_model(demo_path(), lazy=True).report
    assert (report.kernels, report.not_exact) == (("none: no Metal GPU",), ())
    assert str(report).endswith("\nkernels    none: no Metal GPU")


def test_formats_of_requested_quantized_caches_are_passed(monkeypatch):
    asked = []
    load = importlib.import_module("mlx_mtp.checkpoint.load")
    monkeypatch.setattr(load, "switch_on", lambda model, lane, **more: asked.append(more) or (LINES, ()))
    for layout in ({}, {"kv_bits": None, "mtp_kv_bits": 4}, {"kv_bits": 8}):
        mlx_mtp.load_model(demo_path(), lazy=True, budget=Budget(layout=layout))
    assert [more.get("kv_bits") for more in asked] == [None, {4}, {8}]


def test_the_spinner_shows_the_progress_of_trials(monkeypatch):
    shown = []
    status = SimpleNamespace(update=shown.append)
    console = SimpleNamespace(status=lambda text: shown.append(text) or nullcontext(status))
    monkeypatch.setattr(progress, "Console", lambda stderr: console)
    report_progress("Trying kernels", 0, 30)
    with progress.loading(shown=True):
        report_progress("Trying kernels", 3, 30)
    with progress.loading(shown=False):
        report_progress("Trying kernels", 4, 30)
    assert shown == ["Loading the model", "Trying kernels, 3 of 30"]
