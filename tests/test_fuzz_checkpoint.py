"""Damaged checkpoints, at random: a text or one line of error, never a traceback, a hang, or half an output.

Every case is a list of draws, so that what was once found is kept in CORPUS as it was drawn.
"""

import faulthandler
import os
import re
import shutil

import damage
import pytest
from command_line import call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

LONG = os.environ.get("MLX_MTP_SWEEP") == "1"
EXAMPLES = int(os.environ.get("MLX_MTP_EXAMPLES", 1000)) if LONG else 40
BASES = ["step3p5", "sharded", "plain", "qwen3_5"]
COMMANDS = ["inspect", "inspect --json", "generate -m 5 -p abcab --verbose False"]
LOG = os.environ.get("MLX_MTP_FUZZ_LOG", os.devnull)
PATIENCE = 100  # seconds: what takes longer hangs
CORPUS: list[list] = []


class Bases(dict):
    """name -> the files of a whole checkpoint, in few words."""

    def __repr__(self) -> str:
        return f"Bases({', '.join(self)})"


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return Bases((name, damage.build(name, tmp_path_factory.mktemp(name))) for name in BASES)


def tree(path):
    """What lies in a directory, and how large it is."""
    return {str(p.relative_to(path)): p.lstat().st_size for p in path.rglob("*")}


def run_case(bases, directory, draw) -> None:
    """One command on one checkpoint with one or two damages."""
    files, drawn = dict(bases[draw(st.sampled_from(BASES))]), []
    command = draw(st.sampled_from(COMMANDS)).split()
    for kind in draw(st.lists(st.sampled_from(sorted(damage.KINDS)), min_size=1, max_size=2)):
        drawn.append(damage.KINDS[kind](draw, files))
    path = damage.put(directory / "checkpoint", files)
    before = tree(directory)
    with open(LOG, "a") as log, pytest.MonkeyPatch.context() as patch:
        log.write(f"{os.getpid()} {command[0]} {drawn}\n")
        log.flush()
        faulthandler.dump_traceback_later(PATIENCE, exit=True, file=log)
        patch.chdir(directory)
        try:
            result = call(*command, *(["--model"] if command[0] == "generate" else []), path)
        finally:
            faulthandler.cancel_dump_traceback_later()
    assert_orderly(result, command[0])
    assert tree(directory) == before


def assert_orderly(result, command: str) -> None:
    """A result, or nothing but warnings and one line that says why there is none."""
    assert result.returncode in (0, 1), (result.returncode, result.stderr)
    lines = result.stderr.splitlines()
    if result.returncode:
        assert lines[-1].startswith("error: "), lines
        assert not re.search("error: unexpected|std::|json.exception", lines[-1]), lines
        lines.pop()
        assert command != "generate" or not result.stdout, result.stdout
    else:
        assert result.stdout, "nothing was said"
    assert all(line.startswith("warning: ") for line in lines), lines


@settings(max_examples=EXAMPLES, deadline=None, derandomize=not LONG, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damage_is_said_in_one_line(bases, tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("case")
    run_case(bases, directory, data.draw)
    shutil.rmtree(directory)


@pytest.mark.parametrize("draws", CORPUS, ids=str)
def test_what_was_once_found(bases, tmp_path, draws):
    values = iter(draws)
    run_case(bases, tmp_path, lambda strategy: next(values))
