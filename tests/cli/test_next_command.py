"""`verify-lossless`, `doctor` and `bench` name each other: in their help, and below their results."""

import re
import shlex
import sys
from types import SimpleNamespace

import pytest
from command_line import call, command_of, flags

from mlx_mtp.cli import main
from mlx_mtp.cli.next_command import LOADING, after_bench, after_doctor, after_verify
from mlx_mtp.lossless.check import Verdict

GIVEN = {"model": "my model", "draft_model": "d", "config": None}
FOLLOWERS = {
    (after_verify, True): ["mlx-mtp doctor --model 'my model' --draft-model d"],
    (after_verify, False): ["mlx-mtp bench decode --model 'my model' --draft-model d --quick"],
    (after_doctor, False): ["mlx-mtp verify-lossless --model 'my model' --draft-model d --kernels off"],
    (after_doctor, True): [
        "mlx-mtp verify-lossless --model 'my model' --draft-model d",
        "mlx-mtp bench decode --model 'my model' --draft-model d --quick",
    ],
    (after_bench, True): ["mlx-mtp verify-lossless --model 'my model' --draft-model d"],
    (after_bench, False): [
        "mlx-mtp verify-lossless --model 'my model' --draft-model d",
        "mlx-mtp doctor --model 'my model' --draft-model d",
    ],
}


@pytest.mark.parametrize(("line", "outcome"), FOLLOWERS)
def test_a_result_names_commands_that_there_are_for_the_same_model(line, outcome):
    shown = re.findall(r"mlx-mtp .*?(?=  )", line(outcome, GIVEN))
    assert shown == FOLLOWERS[line, outcome]
    for text in shown:
        command, words = command_of(shlex.split(text)[1:])
        assert {word for word in words if word.startswith("-")} <= flags(command)


LOADED = {
    "--model": "m", "--config-from": "c", "--gguf-plan": "small", "--gguf-exact": None, "--trust-remote-code": None,
    "--adapter-path": "a b", "--mtp-path": "h", "--draft-model": "d", "--draft-vocab": "v", "--no-vision": None,
    "--vision-path": "t", "--no-mtp": None, "--kernels": "off",
}  # fmt: skip


def parsed(command, words):
    """The values of a command's options; `command` is a list of names, such as ["bench", "decode"]."""
    found, _ = command_of(command)
    return found.make_context(command[-1], [*words]).params


def loaded(params):
    """The values of the options that state what is loaded."""
    return {name: params[name] for name in (*LOADING, "kernels") if name in params}


@pytest.mark.parametrize("line", [after_verify, after_doctor, after_bench])
@pytest.mark.parametrize("outcome", [False, True])
def test_the_next_command_loads_the_same(line, outcome):
    """Each option alone and all together; --kernels is left out for `doctor`, and of the check without kernels."""
    own = {after_verify: ["verify-lossless"], after_doctor: ["doctor"], after_bench: ["bench", "decode"]}[line]
    allowed = {flag: value for flag, value in LOADED.items() if flag in flags(command_of(own)[0])}
    assert len(allowed) >= len(LOADED) - 1
    cases = [{}, *({flag: value} for flag, value in allowed.items()), allowed]
    for case in cases:
        words = [word for flag, value in case.items() for word in (flag, value) if word is not None]
        given = parsed(own, [*words, *(["--adapter-path", "other"] if "--adapter-path" in case else [])])
        for text in re.findall(r"(?<=mlx-mtp ).*?(?=  )", line(outcome, given)):
            command, rest = command_of(shlex.split(text))
            found, expected = loaded(parsed(shlex.split(text)[: -len(rest) or None], rest)), loaded(given)
            if "doctor" in (command.name, *own) or line is after_doctor:
                found.pop("kernels", None), expected.pop("kernels", None)
            assert found == expected


def test_the_demo_has_no_model_option_and_random_weights_no_line():
    assert after_verify(True, {"model": None}) == "Next: mlx-mtp doctor  checks each kernel"
    assert after_bench(False, {"model": None, "config": "config.json"}) == ""


def test_the_help_of_each_names_the_others():
    names = {"verify-lossless", "doctor", "bench decode"}
    for name in names:
        text = " ".join(command_of(name.split())[0].help.split())
        assert all(f"`mlx-mtp {other}`" in text for other in names - {name}), name
    assert all(f"`mlx-mtp {name}`" in main.commands["bench"].help for name in ("verify-lossless", "doctor"))


def test_verify_lossless_prints_its_line_below_the_verdict(monkeypatch):
    model = SimpleNamespace(spec=None, max_draft_tokens=1, mtp=[], ranks=None)
    monkeypatch.setattr(sys.modules["mlx_mtp.cli.verify_lossless"], "_load", lambda flags: (model, None))
    monkeypatch.setattr("mlx_mtp.lossless.check.verify", lambda *_: Verdict("float32"))
    monkeypatch.setattr("mlx_mtp.cli.verify_tables.show", lambda *_: None)
    assert call("verify-lossless", "--num-draft-tokens", 1).stdout == after_verify(False, {"model": None}) + "\n"
