"""`verify-lossless`, `doctor` and `bench` name each other: in their help, and below their results."""

import re
import shlex
import sys
from types import SimpleNamespace

import pytest
from command_line import call, command_of, flags

from mlx_mtp.cli import main
from mlx_mtp.cli.next_command import after_bench, after_doctor, after_verify
from mlx_mtp.lossless.check import Verdict

GIVEN = {"model": "my model", "draft_model": "d", "config": None}
FOLLOWERS = {
    (after_verify, True): ["mlx-mtp doctor --model 'my model'"],
    (after_verify, False): ["mlx-mtp bench decode --model 'my model' --draft-model d --quick"],
    (after_doctor, False): ["mlx-mtp verify-lossless --model 'my model' --draft-model d --kernels off"],
    (after_doctor, True): [
        "mlx-mtp verify-lossless --model 'my model' --draft-model d",
        "mlx-mtp bench decode --model 'my model' --draft-model d --quick",
    ],
    (after_bench, True): ["mlx-mtp verify-lossless --model 'my model' --draft-model d"],
    (after_bench, False): [
        "mlx-mtp verify-lossless --model 'my model' --draft-model d",
        "mlx-mtp doctor --model 'my model'",
    ],
}


@pytest.mark.parametrize(("line", "outcome"), FOLLOWERS)
def test_a_result_names_commands_that_there_are_for_the_same_model(line, outcome):
    shown = re.findall(r"mlx-mtp .*?(?=  )", line(outcome, GIVEN))
    assert shown == FOLLOWERS[line, outcome]
    for text in shown:
        command, words = command_of(shlex.split(text)[1:])
        assert {word for word in words if word.startswith("-")} <= flags(command)


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
