"""Damage checkpoints at random: the output is complete or a one-line error, never a traceback or a hang.

Every case is a list of draws, so that CORPUS can keep the cases that once failed.
"""

import shutil

import damage
import pytest
from command_line import call
from fuzzing import Files, assert_orderly, profile, tree, watched
from hypothesis import given
from hypothesis import strategies as st

BASES = ["step3p5", "sharded", "plain", "qwen3_5", "deepseek_v3"]
TWO_TOKENS = "-m 2 --draws 50 --no-diagnose"
COMMANDS = [
    "inspect PATH",
    "inspect --json PATH",
    "generate -m 5 -p abcab --verbose False --model PATH",
    "generate -m 5 -p abcab --verbose False --model PATH",
    "chat -m 3 --model PATH",
    "convert --mlx-path NEW --hf-path PATH",
    "convert --mlx-path NEW -q --q-group-size 32 --mtp-q-group-size 32 --hf-path PATH",
    "convert --mtp-only --mtp-path NEW.safetensors --hf-path PATH",
    "cache-prompt -p abcab --prompt-cache-file NEW --model PATH",
    "draft-vocab --out NEW --model PATH",
    "bench model --quick --model PATH",
    f"verify-lossless {TWO_TOKENS} --model PATH",
]
USAGE = ("bench", "cache-prompt")  # commands that may use another complete checkpoint
SPOKEN = ("inspect", "chat", "verify-lossless")  # their output is useful although they fail
CORPUS: list[list] = [  # each with its draws
    ["step3p5", "inspect PATH", ["junk"], "model.safetensors", b"{}", False],
    ["step3p5", COMMANDS[2], ["config_entry"], "config.json", "rms_norm_eps", "\ud800"],
    ["step3p5", COMMANDS[5], ["config_entry"], "config.json", "moe_router_scaling_factor", None],
    ["step3p5", "inspect PATH", ["config_entry"], "config.json", "num_nextn_predict_layers", "1"],
    ["step3p5", "inspect PATH", ["config_entry"], "config.json", "num_nextn_predict_layers", 10**9],
    ["step3p5", COMMANDS[-1], ["odd_file"], "tokenizer.json", b"->tokenizer.json"],
    ["qwen3_5", "draft-vocab --out NEW --model PATH", ["odd_file"], "tokenizer.json", None],
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return Files((name, damage.build(name, tmp_path_factory.mktemp(name))) for name in BASES)


def run_case(bases, directory, draw) -> None:
    """Run one command on one checkpoint with one or two kinds of damage."""
    files = dict(bases[draw(st.sampled_from(BASES))])
    command = draw(st.sampled_from(COMMANDS)).split()
    kinds = draw(st.lists(st.sampled_from(sorted(damage.KINDS)), min_size=1, max_size=2))
    drawn = [damage.KINDS[kind](draw, files) for kind in kinds]
    path = damage.put(directory / "checkpoint", files)
    before = tree(directory)
    result = watched(directory, [str(path) if word == "PATH" else word for word in command], drawn, b"abc\nab\n")
    if command[0] != "verify-lossless" or not result.stdout:  # its output lists differences
        assert_orderly(result, (0, 1, 2) if command[0] in USAGE else (0, 1), turns=command[0] == "chat")
    assert result.returncode or result.stdout or command[0] == "chat", "no output"
    made = tree(directory).keys() - before.keys()
    assert {name: size for name, size in tree(directory).items() if name in before} == before
    assert {name.partition("/")[0] for name in made} <= {"NEW", "NEW.safetensors"}
    if result.returncode:
        assert not made
        assert command[0] in SPOKEN or not result.stdout, result.stdout
    if command[0] == "convert" and "NEW" in made:
        again = call("inspect", directory / "NEW")
        assert again.returncode == 0, again.stderr


@profile(7)
@given(data=st.data())
def test_damage_is_a_one_line_error(bases, tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("case")
    run_case(bases, directory, data.draw)
    shutil.rmtree(directory)


@pytest.mark.parametrize("draws", CORPUS, ids=str)
def test_cases_that_once_failed(bases, tmp_path, draws):
    values = iter(draws)
    run_case(bases, tmp_path, lambda strategy: next(values))
