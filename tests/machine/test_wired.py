"""Check that the wired limit is set once per load while nothing runs, and by no generation."""

import ast
from pathlib import Path

import mlx.core as mx
import pytest
from click.testing import CliRunner

import mlx_mtp
from mlx_mtp.cli import main
from mlx_mtp.demo import demo_path
from mlx_mtp.machine import wired
from mlx_mtp.machine.wired import AUTO, OFF, check_wired_limit, wire

GB = 10**9


@pytest.fixture
def calls(monkeypatch):
    """Calls on a GPU that recommends 10 GB, in order."""
    made = []
    monkeypatch.setattr(wired, "working_set", lambda: 10 * GB)
    monkeypatch.setattr(wired, "_set", 0)
    monkeypatch.setattr(mx, "synchronize", lambda *_: made.append("wait"))
    monkeypatch.setattr(mx, "set_wired_limit", made.append)
    return made


@pytest.mark.parametrize(
    ("weights", "limit", "expected"),
    [
        (7 * GB, AUTO, 0), (8 * GB, AUTO, 10 * GB), (12 * GB, AUTO, 10 * GB), (12 * GB, OFF, 0),
        (GB, 4 * GB, 4 * GB), (12 * GB, 0, 0),
    ],
)  # fmt: skip
def test_a_load_sets_the_limit(calls, weights, limit, expected):
    assert wire(weights, limit) == expected
    assert calls == (["wait", expected] if expected else [])


def test_a_later_load_never_lowers_it(calls):
    assert wire(GB, 4 * GB) == wire(GB, 3 * GB) == wire(GB, AUTO) == wire(GB, OFF) == 4 * GB
    assert wire(9 * GB, AUTO) == 10 * GB
    assert calls == ["wait", 4 * GB, "wait", 10 * GB]


def test_nothing_is_set_without_a_gpu(monkeypatch):
    monkeypatch.setattr(wired, "working_set", lambda: None)
    monkeypatch.setattr(mx, "set_wired_limit", lambda _: pytest.fail("there is no GPU"))
    assert wire(12 * GB, AUTO) == wire(12 * GB, 4 * GB) == 0


@pytest.mark.parametrize("limit", ["more", -1, True, 1.5, 11 * GB])
def test_limits_that_are_refused(calls, limit):
    with pytest.raises(ValueError, match="wired_limit="):
        check_wired_limit(limit)
    with pytest.raises(ValueError, match="wired_limit="):
        mlx_mtp.load(demo_path(), wired_limit=limit)
    assert calls == []


def test_a_generation_does_not_set_the_limit(calls):
    model, tokenizer = mlx_mtp.load(demo_path(), wired_limit=4 * GB)
    assert calls[-2:] == ["wait", 4 * GB]
    calls.clear()
    mlx_mtp.generate(model, tokenizer, "def f():", max_tokens=4)
    mlx_mtp.batch_generate(model, tokenizer, [[1, 2], [3]], max_tokens=4)
    assert [call for call in calls if call != "wait"] == []


def test_the_option(calls):
    run = CliRunner()
    command = ["generate", "--prompt", "x", "--max-tokens", "1", "--wired-limit"]
    assert run.invoke(main, [*command, "4000"]).exit_code == 0
    assert calls[-1] == 4 * GB
    for wrong in ("11000", "much", "-1", ""):
        found = run.invoke(main, [*command, wrong])
        assert found.exit_code == 2, wrong
        assert "--wired-limit" in found.output


def test_only_the_load_calls_mlx():
    """No other code sets the limit or calls mlx-lm's function for it."""
    package = Path(mlx_mtp.__file__).parent
    found = {
        file.relative_to(package).as_posix()
        for file in package.rglob("*.py")
        if "wired_limit" in (code := file.read_text())
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute | ast.Name | ast.alias)
        and {getattr(node, "attr", ""), getattr(node, "id", ""), getattr(node, "name", "")}
        & {"set_wired_limit", "wired_limit"}
        and (isinstance(node, ast.alias) or ast.unparse(node) not in ("wired_limit", "options.wired_limit"))
    }
    assert found == {"machine/wired.py"}
