"""Number of cases of a fuzzer, a time limit for commands, and a check of how a command ends."""

import faulthandler
import os
import re
from pathlib import Path

import pytest
from command_line import call
from hypothesis import HealthCheck, settings

LONG = os.environ.get("MLX_MTP_SWEEP") == "1"
LOG = os.environ.get("MLX_MTP_FUZZ_LOG", os.devnull)
PATIENCE = 100  # seconds


def count(few: int, many: int) -> int:
    """Return the number of cases: `few`, or MLX_MTP_EXAMPLES or else `many` in a sweep."""
    return int(os.environ.get("MLX_MTP_EXAMPLES", many)) if LONG else few


def profile(few: int) -> settings:
    """Return hypothesis settings for `few` fixed cases; for more random ones in a sweep."""
    kept = {"deadline": None, "derandomize": not LONG, "suppress_health_check": list(HealthCheck)}
    return settings(max_examples=count(few, 1000), **kept)


class Files(dict):
    """Files by name, with a short representation for hypothesis."""

    def __repr__(self) -> str:
        return f"Files({', '.join(self)})"


def tree(path: Path) -> dict[str, int]:
    """Return the sizes of a directory's files by name."""
    return {str(p.relative_to(path)): p.lstat().st_size for p in path.rglob("*")}


def watched(directory: Path, command: list[str], what: object, stdin: bytes = b""):
    """Run a command in a directory; one that hangs ends the tests, and its arguments are in MLX_MTP_FUZZ_LOG."""
    with open(LOG, "a") as log, pytest.MonkeyPatch.context() as patch:
        log.write(f"{os.getpid()} {command} {what} {stdin[:20]!r}\n")
        log.flush()
        faulthandler.dump_traceback_later(PATIENCE, exit=True, file=log)
        patch.chdir(directory)
        patch.setenv("HF_HUB_OFFLINE", "1")
        try:
            return call(*command, stdin=stdin)
        finally:
            faulthandler.cancel_dump_traceback_later()


def assert_orderly(result, codes: tuple[int, ...] = (0, 1), *, turns: bool = False) -> None:
    """Assert that stderr contains warnings, notices, and at the end at most one line of error per failed turn."""
    assert result.returncode in codes, (result.returncode, result.stderr)
    lines = result.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error: ")]
    if result.returncode:
        assert errors[-1:] == lines[-1:], lines
    assert turns or len(errors) == (result.returncode != 0), lines
    assert not re.search(r"error: unexpected|std::|json\.exception|Traceback", result.stderr), lines
