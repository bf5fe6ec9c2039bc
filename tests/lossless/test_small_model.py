"""Run `verify-lossless` on a model with a small model as its drafter."""

import drafters
import families
import pytest
from sweep import sweep

import mlx_mtp
from mlx_mtp.lossless import check
from mlx_mtp.lossless.check import CheckSettings, verify

QUICK = CheckSettings(2, max_tokens=16, draws=6, adaptive=False, lookup=False)


class Letters:
    """A tokenizer of the families' tokens."""

    has_chat_template = False
    eos_token_ids = frozenset()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(c) % families.V for c in text][:40]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("small")
    directory, _ = families.headless(path, drafters.HEADLESS["qwen3"])
    return mlx_mtp.load_model(directory, draft_model=directory)


@sweep
def test_the_target_itself_predicts_all_and_a_wrong_model_is_found(model, monkeypatch):
    monkeypatch.setattr(check, "built_in", lambda *_: [check.NamedPrompt("p", [1, 2, 3, 4, 0] * 4, stops=False)])
    verdict = verify(model, Letters(), QUICK, lambda *_: None)
    assert verdict.broken == []
    assert verdict.agreement == [1.0]
    assert verdict.kept[0] == verdict.kept[1] > 0
    logits = model.drafter.logits
    monkeypatch.setattr(model.drafter, "logits", lambda rows: -logits(rows))
    verdict = verify(model, Letters(), QUICK, lambda *_: None)
    assert verdict.broken == ["the drafter predicts the target's token in 0.0% of cases"]
