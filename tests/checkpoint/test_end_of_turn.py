"""The special token that a chat template writes behind an answer ends it, whatever a checkpoint's files name."""

import json
import shutil

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from thinking import plain_tokenizer
from turn_templates import END_OF_TEXT, ENDED, NOT_ENDED

from mlx_mtp.checkpoint import end_of_turn
from mlx_mtp.checkpoint.end_of_turn import add_end_of_turn
from mlx_mtp.checkpoint.load import load_tokenizer as load
from mlx_mtp.checkpoint.template_process import rendered_within
from mlx_mtp.demo import demo_path


@pytest.fixture
def isolated(monkeypatch):
    """The tokenizers whose templates were about to be rendered; they are, in this process."""
    found = []
    monkeypatch.setattr(end_of_turn, "isolate", found.append)
    return found


def tokenizer_of(template, special, ends=(END_OF_TEXT,), bos="<|bos|>"):
    plain = plain_tokenizer()
    plain.add_special_tokens(
        {"additional_special_tokens": [*special, bos, *ends], "bos_token": bos, "eos_token": ends[0]}
    )
    plain.chat_template = template
    return TokenizerWrapper(plain, eos_token_ids=plain.convert_tokens_to_ids([*ends]))


def ends_of(tokenizer):
    add_end_of_turn(tokenizer)
    return {*tokenizer.convert_ids_to_tokens(sorted(tokenizer.eos_token_ids))}


@pytest.mark.parametrize("family", ENDED)
def test_the_token_behind_an_answer_ends_it(family, isolated):
    template, special, end = ENDED[family]
    assert ends_of(tokenizer_of(template, special)) == {END_OF_TEXT, end}
    assert len(isolated) == 1
    assert ends_of(tokenizer_of(template, special, (end,))) == {end}  # which the files name
    assert len(isolated) == 1  # so that the template is not rendered
    if end != "<|im_end|>":  # which is always special here
        assert ends_of(tokenizer_of(template, [each for each in special if each != end])) == {END_OF_TEXT}


@pytest.mark.parametrize("family", NOT_ENDED)
def test_no_other_token_ends_an_answer(family, isolated):
    """What opens the next turn, ends a part of an answer, or is no special token is not added."""
    template, special = NOT_ENDED[family]
    assert ends_of(tokenizer_of(template, special)) == {END_OF_TEXT}


LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}<|im_end|>"


@pytest.mark.parametrize("loops", [False, True])
def test_a_load_adds_it_and_is_not_held_by_a_template(loops, tmp_path):
    path = shutil.copytree(demo_path(), tmp_path / "m")
    config = json.loads((path / "tokenizer_config.json").read_text())
    if loops:
        (path / "chat_template.jinja").write_text(LOOP)
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": END_OF_TEXT}))
    with rendered_within(1.0 if loops else 60.0):
        found = load(path, None, {"eos_token_id": 0})
    expected = {END_OF_TEXT} | ({"<|im_end|>"} if not loops else set())
    assert {*found.convert_ids_to_tokens(sorted(found.eos_token_ids))} == expected
