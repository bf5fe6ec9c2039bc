"""Damaged checkpoints, at random: a text or one line of error, never a traceback, a hang, or half an output."""

import faulthandler
import os
import shutil

import damage
import pytest
from command_line import call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LONG = os.environ.get("MLX_MTP_SWEEP") == "1"
EXAMPLES = int(os.environ.get("MLX_MTP_EXAMPLES", 1000)) if LONG else 12
BASES = ["step3p5", "sharded", "plain", "qwen3_5"]
COMMANDS = [("inspect",), ("inspect", "--json"), ("generate", "-m", 5, "-p", "abcab", "--verbose", "False")]
PATIENCE = 100  # seconds: what takes longer hangs


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """name -> the files of a whole checkpoint"""
    return {name: damage.build(name, tmp_path_factory.mktemp(name)) for name in BASES}


def tree(path):
    """What lies in a directory, and how large it is."""
    return {str(p.relative_to(path)): p.lstat().st_size for p in path.rglob("*")}


def assert_orderly(result, said: str) -> None:
    """A result, or nothing but warnings and one line that says why there is none."""
    assert result.returncode in (0, 1), (result.returncode, result.stderr)
    lines = result.stderr.splitlines()
    if result.returncode:
        assert lines[-1].startswith("error: "), lines
        assert "unexpected" not in lines[-1], lines
        lines.pop()
    else:
        assert result.stdout
    assert all(line.startswith("warning: ") for line in lines), lines
    assert result.returncode == 0 or not said, said


@settings(max_examples=EXAMPLES, deadline=None, derandomize=not LONG, suppress_health_check=list(HealthCheck))
@given(data=st.data())
@pytest.mark.parametrize("kind", damage.KINDS)
def test_damage_is_said_in_one_line(bases, tmp_path_factory, monkeypatch, kind, data):
    files = dict(bases[data.draw(st.sampled_from(BASES))])
    done = [damage.KINDS[kind](data.draw, files)]
    command = data.draw(st.sampled_from(COMMANDS))
    directory = tmp_path_factory.mktemp("case")
    path = damage.put(directory / "checkpoint", files)
    before = tree(directory)
    if log := os.environ.get("MLX_MTP_FUZZ_LOG"):
        with open(log, "a") as f:
            f.write(f"{command} {done}\n")
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    monkeypatch.chdir(directory)
    try:
        flags = ("--model", path) if command[0] == "generate" else (path,)
        result = call(*command, *flags)
    finally:
        faulthandler.cancel_dump_traceback_later()
    assert_orderly(result, result.stdout if command[0] == "generate" else "")
    assert tree(directory) == before
    shutil.rmtree(directory)
