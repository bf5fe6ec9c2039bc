"""The command line with odd flags, prompts and input: exit code 0, 1 or 2, and one line for what is wrong."""

import faulthandler
import os
import re

import click
import damage
import pytest
from command_line import call
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_mtp.cli import main

LONG = os.environ.get("MLX_MTP_SWEEP") == "1"
EXAMPLES = int(os.environ.get("MLX_MTP_EXAMPLES", 1000)) if LONG else 60
LOG = os.environ.get("MLX_MTP_FUZZ_LOG", os.devnull)
PATIENCE = 100  # seconds: what takes longer hangs
COMMANDS = ["generate", "chat", "inspect", "draft-vocab"]
NUMBERS = [
    "",
    "-1",
    "-0",
    "0",
    "1",
    "2",
    "3",
    "7",
    "64",
    "1.5",
    "0.5",
    "1e-40",
    "1e400",
    "nan",
    "-nan",
    "inf",
    "9" * 30,
]
NUMBERS += [str(2**31), str(2**63 - 1), str(2**63), "0x10", "1_000", "\u0663", "x"]
USUAL = ["0", "1", "2", "0.5", "8", "abc", "True"]
FEW = ["-2", "0", "1", "5", "x", ""]  # tokens: a text without an end would be no defect
TEXTS = [
    "",
    "-",
    "a",
    "abcab",
    "<e>",
    "<u><a><e>",
    "a" * 300,
    "xyz",
    "é💥",
    "\udcff",
    "\0",
    "\\n\\t",
    "{",
    "[]",
    "{}",
]
TEXTS += ['{"a": 1}', '{"tokenize": true}', "null", "--", "-p", "=", "a=b"]
PATHS = [
    "",
    ".",
    "..",
    "/",
    "/dev/null",
    "/no/such",
    "none/such",
    "DIR",
    "FILE",
    "HERE/new.json",
    "TEXT",
    "LOOP",
    "~x",
]
SHORT = {"-m": FEW, "--max-tokens": FEW}
PATHLIKE = (
    "--model",
    "--mtp-path",
    "--adapter-path",
    "--draft-model",
    "--draft-vocab",
    "--prompt-cache-file",
    "--out",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A directory with a checkpoint, a file, a text, and a link to itself."""
    here = tmp_path_factory.mktemp("here")
    damage.put(here / "DIR", damage.build("step3p5", tmp_path_factory.mktemp("built")))
    (here / "FILE").write_bytes(b"\x00\xff")
    (here / "TEXT").write_text("abc")
    (here / "LOOP").symlink_to("LOOP")
    return here


def arguments(draw, command: str) -> list[str]:
    """Some of the command's options with any values, and the rest of what it needs."""
    params = [p for p in main.commands[command].params if not p.is_eager]
    given: list[str] = []
    for param in draw(st.lists(st.sampled_from(params), max_size=4, unique_by=lambda p: p.name)):
        flag = draw(st.sampled_from([*param.opts, *param.secondary_opts])) if param.opts else ""
        if isinstance(param, click.Argument):
            given.append(draw(st.sampled_from(PATHS + TEXTS)))
        elif param.is_flag:
            given.append(flag)
        else:
            usual = SHORT.get(flag) or (
                PATHS if flag in PATHLIKE else draw(st.sampled_from([USUAL, NUMBERS + TEXTS]))
            )
            choices = list(param.type.choices) if isinstance(param.type, click.Choice) else []
            given += [flag, draw(st.sampled_from([*usual, *choices]))]
    if command in ("generate", "chat") and not {"-m", "--max-tokens"} & set(given):
        given += ["-m", "4"]
    if command != "inspect" and "--model" not in given:
        given += ["--model", "DIR"]
    if command == "draft-vocab" and "--out" not in given:
        given += ["--out", "HERE/new.json"]
    return given


def run_case(whole, draw) -> None:
    command = draw(st.sampled_from(COMMANDS))
    given = [value.replace("HERE", str(whole)) for value in arguments(draw, command)]
    stdin = draw(
        st.sampled_from([b"", b"a", b"\xff\xfe\n", b"abc\n/stats\n\0\n", b"/mtp off\nab\n", b"a" * 300, b"\n" * 50])
    )
    before = sorted(whole.rglob("*"))
    with open(LOG, "a") as log, pytest.MonkeyPatch.context() as patch:
        log.write(f"{os.getpid()} {command} {given} {stdin[:20]!r}\n")
        log.flush()
        faulthandler.dump_traceback_later(PATIENCE, exit=True, file=log)
        patch.chdir(whole)
        patch.setenv("HF_HUB_OFFLINE", "1")
        try:
            result = call(command, *given, stdin=stdin)
        finally:
            faulthandler.cancel_dump_traceback_later()
    assert_orderly(result, command)
    made = [path.name for path in whole.rglob("*") if path not in before]
    assert made == (["new.json"] if result.returncode == 0 and command == "draft-vocab" and made else []), made
    for name in made:
        (whole / name).unlink()


def assert_orderly(result, command: str) -> None:
    assert result.returncode in (0, 1, 2), (result.returncode, result.stderr)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in result.stderr
    assert not re.search("error: unexpected|std::", result.stderr), result.stderr
    if result.returncode:
        assert len(errors) == 1, result.stderr
        assert result.stderr.splitlines()[-1] == errors[0]
    elif command != "chat":  # whose turns may fail, one line each
        assert not errors, errors


@settings(max_examples=EXAMPLES, deadline=None, derandomize=not LONG, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_flags(whole, data):
    run_case(whole, data.draw)
