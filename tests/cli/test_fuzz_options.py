"""Run the command line with odd flags, prompts and input: exit code 0, 1 or 2, and one line per error."""

import json
import os
import shutil
from pathlib import Path

import click
import damage
import pytest
import results
from fuzzing import assert_orderly, profile, tree, watched
from hypothesis import given
from hypothesis import strategies as st

from mlx_mtp.cli import main

# Arguments that each command needs to run, and to run fast.
NEEDED = {
    "generate": ["-m", "4"],
    "chat": ["-m", "4"],
    "inspect": [],
    "draft-vocab": ["--out", "new.json"],
    "convert": ["--hf-path", "DIR", "--mlx-path", "new"],
    "cache-prompt": ["-p", "abc", "--prompt-cache-file", "new"],
    "verify-lossless": ["-m", "2", "--draws", "50", "--no-diagnose"],
    "bench decode": ["--quick", "--rounds", "1", "-m", "2", "--categories", "code_python", "--cooldown", "0"],
    "bench parallel": ["--quick", "--rounds", "1", "-m", "2", "--texts", "1", "--cooldown", "0"],
    "bench verify": ["--rows", "1,2", "--contexts", "8", "--rounds", "1"],
    "bench profile": ["--quick", "--rounds", "1", "-m", "2", "--cooldown", "0"],
    "bench model": ["--quick"],
    "bench compare": [],
    "bench plot": ["--html", "new.html"],
    "bench kernels": ["--rows", "1"],
}
ARGUMENTS = {"path": "DIR", "texts": "TEXT", "before": "RESULT", "after": "RESULT", "files": "RESULT"}
NUMBERS = [*("", "-1", "-0", "0", "1", "2", "3", "7", "64", "1.5", "0.5", "1e-40", "1e400", "nan", "-nan", "inf")]
NUMBERS += ["9" * 30, str(2**31), str(2**63 - 1), str(2**63), "0x10", "1_000", "\u0663", "x", "1,2", "0,", "1,nan"]
USUAL = ["0", "1", "2", "0.5", "8", "abc", "True"]
FEW = ["-2", "0", "1", "5", "x", ""]  # tokens, rounds, rows; an endless text would not be a defect
TEXTS = [*("", "-", "a", "abcab", "<e>", "<u><a><e>", "a" * 300, "xyz", "é💥", "\udcff", "\0", "\\n\\t", "{", "[]")]
TEXTS += ["{}", '{"a": 1}', '{"tokenize": true}', "null", "--", "-p", "=", "a=b"]
ODD = ["", ".", "DIR", "LOOP", "~x", "a\0b", "/dev/null", "/dev/null/x", "none/such"]
READ = [*ODD, "..", "/", "/no/such", "/dev/zero", "PIPE", "FILE", "TEXT", "DEEP", "RESULT", "TASKS"]
WRITTEN = [*ODD, "new", "new.json", "new.png", "new.svg", "new.html", "new.safetensors"]
MADE = ("new", "none", "~x", "mtp.safetensors", "DIR/mtp.safetensors")
FEW_FLAGS = (
    "-m",
    "--max-tokens",
    "--rounds",
    "--rows",
    "--contexts",
    "--context",
    "--cooldown",
    "--draws",
    "--texts",
)
READ_FLAGS = ("--model", "--hf-path", "--mtp-path", "--adapter-path", "--draft-model", "--draft-vocab", "--config")
READ_FLAGS += ("--prompt-cache-file", "--measured")
WRITTEN_FLAGS = ("--out", "--mlx-path", "--plot", "--html", "--capture-path")
WRITTEN_BY = {("cache-prompt", "--prompt-cache-file"), ("convert", "--mtp-path")}
SLOW_FLAGS = ("--emulate", "--compile", "--diagnose", "--trust-remote-code")  # the last may download
STDIN = [b"", b"a", b"\xff\xfe\n", b"abc\n/stats\n\0\n", b"/mtp off\nab\n", b"a" * 300, b"\n" * 50]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A directory with a checkpoint, files of several kinds, and a link to itself."""
    here = tmp_path_factory.mktemp("here")
    damage.put(here / "DIR", damage.build("step3p5", tmp_path_factory.mktemp("built")))
    (here / "FILE").write_bytes(b"\x00\xff")
    (here / "TEXT").write_text("abc")
    (here / "RESULT").write_text(json.dumps(results.decode_result()))
    (here / "TASKS").write_text('{"question": "a?", "answer": 1}\n')
    (here / "LOOP").symlink_to("LOOP")
    os.mkfifo(here / "PIPE")
    (here / "DEEP").write_text("[" * 50_000)
    return here


def command_of(name: str) -> click.Command:
    group, _, inside = name.rpartition(" ")
    found = main.commands[group].commands if group else main.commands  # type: ignore[attr-defined]
    return found[inside]


def arguments(draw, name: str) -> list[str]:
    """Draw some of the command's options with any values, plus its required arguments."""
    params = [p for p in command_of(name).params if not p.is_eager and not set(p.opts) & set(SLOW_FLAGS)]
    unnamed = {p.name: ARGUMENTS[p.name] for p in params if isinstance(p, click.Argument)}
    given: list[str] = []
    for param in draw(st.lists(st.sampled_from(params), max_size=4, unique_by=lambda p: p.name)):
        flag = draw(st.sampled_from([*param.opts, *param.secondary_opts]))
        if isinstance(param, click.Argument):
            unnamed[param.name] = draw(st.sampled_from(READ + TEXTS))
        elif getattr(param, "is_flag", False):
            given.append(flag)
        else:
            given += [flag, draw(st.sampled_from(values(draw, name, flag, param)))]
    needed = NEEDED[name]
    for flag, value in zip(needed, [*needed, ""][1:], strict=True):
        if flag.startswith("-") and flag not in given and not (flag == "-m" and "--max-tokens" in given):
            given += [flag] if value.startswith("-") or not value else [flag, value]
    model = next((p for p in command_of(name).params if "--model" in p.opts and "--hf-path" not in p.opts), None)
    if model and "--model" not in given and "--config" not in given:
        given += ["--model", "DIR"]
    return [*given, *unnamed.values()]


def values(draw, name: str, flag: str, param: click.Parameter) -> list[str]:
    """Draw the values of an option."""
    if flag in WRITTEN_FLAGS or (name, flag) in WRITTEN_BY:
        return WRITTEN
    if flag in READ_FLAGS:
        return READ
    if flag in FEW_FLAGS:
        return FEW
    choices = list(param.type.choices) if isinstance(param.type, click.Choice) else []
    return choices * 2 + draw(st.sampled_from([USUAL, NUMBERS + TEXTS]))


def run_case(whole, draw) -> None:
    name = draw(st.sampled_from(sorted(NEEDED)))
    check(whole, name, arguments(draw, name), draw(st.sampled_from(STDIN)))


def check(whole, name: str, given: list[str], stdin: bytes = b"") -> None:
    before = tree(whole)
    kept = {path: path.read_bytes() for path in whole.iterdir() if path.is_file()}
    result = watched(whole, [*name.split(), *given], "", stdin)
    assert_orderly(result, (0, 1, 2), turns=name == "chat")
    made = tree(whole).keys() - before.keys()
    assert all(path.startswith(MADE) for path in made), made
    assert not (result.returncode and made) or name.startswith("bench"), made  # bench writes its result first
    assert Path("/dev/null").is_char_device()
    for path in made:
        shutil.rmtree(whole / path) if (whole / path).is_dir() else (whole / path).unlink(missing_ok=True)
    for path, content in kept.items():
        path.write_bytes(content)


@profile(2)
@given(data=st.data())
def test_any_flags(whole, data):
    run_case(whole, data.draw)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("bench model", ["--quick", "--out", "/dev/null", "--html", "/dev/null"]),
        ("bench compare", ["TEXT", "PIPE"]),
        ("bench plot", ["DEEP", "--html", "new.html"]),
        ("generate", ["--draft-vocab", "/dev/zero", "--model", "DIR", "-m", "1"]),
    ],
)
def test_earlier_findings(whole, name, given):
    check(whole, name, given)
