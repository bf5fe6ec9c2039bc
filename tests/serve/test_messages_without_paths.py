"""No error that a client receives names a path on the server, or a variable of its environment."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_mtp.machine.errors import without_directories
from mlx_mtp.machine.memory import IGNORE
from mlx_mtp.serve import max_tokens
from mlx_mtp.serve.catalog import ModelFacts
from mlx_mtp.serve.endings import failed_by

MODEL = Path.home() / "My Models" / "qwen"
FAILURES = {
    "missing": FileNotFoundError(2, "No such file or directory", str(MODEL / "config.json")),
    "two files": OSError(18, "Invalid cross-device link", "/var/lib/a b/x.tmp", None, "/var/lib/a b/x"),
    "a file's line": ValueError(f"{MODEL}/model.safetensors: truncated or damaged"),
    "a directory's line": ValueError(f"{MODEL}: no tokenizer; it needs one of tokenizer.json, tokenizer.model"),
    "in quotes": RuntimeError(f'Unable to open "{MODEL}/weights 1.safetensors".'),
    "in parentheses": ValueError("no usable tokenizer (/opt/models/qwen/tokenizer.json is empty)"),
    "home": KeyError(f"~/models/qwen and {Path.home()}/x"),
    "of this package": ImportError("cannot import name 'x' from 'mlx_mtp' (/usr/lib/python3/mlx_mtp/__init__.py)"),
    "one level": ValueError("/models: is empty"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_name_no_directory(name):
    offer = ModelFacts("qwen", MODEL, problem=str(FAILURES[name]))
    for text in (failed_by(FAILURES[name]).message, offer.shown_problem):
        assert "/" not in text
        assert "qwen/" not in text
        assert "\n" not in text
        assert any(word in text for word in ("config", "x", "model", "qwen", "tokenizer", "weights"))


@pytest.mark.parametrize("folder", ["models", "./a b/models", "../models"])
def test_a_folder_given_without_its_root_is_not_named(folder):
    offer = ModelFacts(
        "qwen", Path(folder) / "qwen", problem=f"{Path(folder) / 'qwen' / 'config.json'}: no model_type"
    )
    assert offer.shown_problem == "config.json: no model_type"
    assert without_directories("other/models/qwen: x", Path("models")) == "other/models/qwen: x"


@pytest.mark.parametrize(
    "text",
    [
        "</b> is missing", "tokens/s: 1/2", "see http://host/a/b?c", "a / b", "application/json",
        "prompt: 9 tokens and max_tokens=4: 2.0 GB needed in addition to the model, 1.0 GB available",
    ],
)  # fmt: skip
def test_other_messages_stay(text):
    assert without_directories(text) == text


def test_a_prompt_without_room_is_no_advice_to_set_a_variable(monkeypatch):
    def full(*_, **__):
        raise ValueError(f"prompt: 5 tokens: 2 GB needed; set {IGNORE}=1 to skip this check")

    monkeypatch.setattr(max_tokens, "check_prompt", full)
    served = SimpleNamespace(ranks=None, model=None, tree=SimpleNamespace(chunking=SimpleNamespace(step=4)))
    request = SimpleNamespace(prompt=[1] * 5, max_tokens=64)
    with pytest.raises(ValueError, match=r"2 GB needed$"):
        max_tokens.agreed_max_tokens(served, SimpleNamespace(offset=0), request)
