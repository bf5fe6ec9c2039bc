"""A checkpoint's own Python code runs only with the flag, whatever standard input contains."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from command_line import call, free_port, one_line_error
from transformers import dynamic_module_utils

import mlx_mtp
from mlx_mtp.demo import demo_path

PACKAGE = Path(mlx_mtp.__file__).parent
CODE = "from pathlib import Path\nPath(__file__ + '.ran').touch()\nclass T: pass\n"
TOKENIZER = {"auto_map": {"AutoTokenizer": ["evil.T", "evil.T"]}, "tokenizer_class": "T"}
CONFIG = {"auto_map": {"AutoConfig": "evil.T", "AutoTokenizer": "evil.T", "AutoModelForCausalLM": "evil.T"}}
RUN = ("-m", 2, "--quiet", "--model")
COMMANDS = {
    "generate": ("generate", "-p", "x", *RUN),
    "chat": ("chat", *RUN),
    "serve": ("serve", "--quiet", "--port", "PORT", "--model"),
    "cache-prompt": ("cache-prompt", "-p", "x", "--prompt-cache-file", "OUT", "--model"),
    "draft-vocab": ("draft-vocab", "--out", "OUT", "--model"),
    "tune-heads": ("tune-heads", "--out", "OUT", "--model"),
    "verify-lossless": ("verify-lossless", "--model"),
    "bench": ("bench", "decode", "-m", 2, "--model"),
    "a drafter": ("generate", "-p", "x", "-m", 2, "--quiet", "--draft-model"),
}
# Commands that load no tokenizer.
OTHER_COMMANDS = {"inspect": ("inspect",), "convert": ("convert", "--mlx-path", "OUT", "--hf-path")}


@pytest.fixture(scope="module", autouse=True)
def copies(tmp_path_factory):
    """The directory to which transformers copies code before it imports it."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("modules")
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
        patch.setattr("sys.path", [*sys.path])
        yield folder


@pytest.fixture(scope="module")
def evil(tmp_path_factory):
    path = shutil.copytree(demo_path(), tmp_path_factory.mktemp("evil") / "model")
    for name, more in (("tokenizer_config.json", TOKENIZER), ("config.json", CONFIG)):
        (path / name).write_text(json.dumps(json.loads((path / name).read_text()) | more))
    (path / "evil.py").write_text(CODE)
    return path


def has_run(*places):
    """Whether the code has run in one of these directories."""
    return any(file for place in places for file in place.rglob("evil.py.ran"))


def words(command, tmp_path):
    filled = {"OUT": tmp_path / "out", "PORT": free_port()}
    return [filled.get(word, word) for word in command]


@pytest.mark.parametrize("command", COMMANDS)
def test_code_never_runs_without_the_flag(command, evil, copies, tmp_path):
    line = one_line_error(call(*words(COMMANDS[command], tmp_path), evil, stdin="y\n" * 9))
    assert not has_run(evil, copies)
    assert "--trust-remote-code" in line
    assert str(evil) in line


@pytest.mark.parametrize("command", OTHER_COMMANDS)
def test_commands_without_a_tokenizer_run_no_code(command, evil, copies, tmp_path):
    assert call(*words(OTHER_COMMANDS[command], tmp_path), evil, stdin="y\n" * 9).returncode == 0
    assert not has_run(evil, copies)


def test_python_asks_for_no_consent_either(evil, copies, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    for options in ({}, {"tokenizer_config": {}}, {"tokenizer_config": {"trust_remote_code": None}}):
        with pytest.raises(ValueError, match="trust_remote_code=True"):
            mlx_mtp.load(evil, **options)
    assert not has_run(evil, copies)


def test_tokenizers_are_loaded_in_one_place():
    """Each other call that loads a tokenizer, config or model of transformers or mlx-lm could ask for consent."""
    loading = re.compile(r"\.(from_pretrained|_?load_tokenizer|get_class_from_dynamic_module)\(")
    found = [(file.name, name) for file in PACKAGE.rglob("*.py") for name in loading.findall(file.read_text())]
    assert found == [("load.py", "load_tokenizer")]


def test_code_runs_with_the_flag(evil, copies):
    """The class is no tokenizer, so the load fails afterwards."""
    call(*COMMANDS["generate"], evil, "--trust-remote-code")
    assert has_run(evil, copies)
