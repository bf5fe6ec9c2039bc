"""The prompts of the program that writes SmolLM2's answers: two kinds in turn, and no test question."""

from types import SimpleNamespace

from bench.smollm2_head import answers
from bench.smollm2_head.prompts import TEST_QUESTIONS

BEFORE, AFTER = "<s>helper</s><u>", "</u><a>"


class Tokenizer:
    """Its tokens are the letters' numbers."""

    def apply_chat_template(self, messages, *, tokenize=True, **_):
        text = BEFORE + messages[0]["content"] + AFTER
        return [ord(letter) for letter in text] if tokenize else text

    def decode(self, tokens):
        return "".join(map(chr, tokens))

    has_chat_template = True


def test_templates_and_own_messages_in_turn_without_the_test_questions(monkeypatch):
    own = ["Hi!", TEST_QUESTIONS[0], "two\nlines"]
    tokens = [[ord(letter) for letter in BEFORE + message + AFTER] for message in own]
    monkeypatch.setattr(answers, "own_prompts", lambda *_: iter(tokens))
    found = list(answers.prompts(None, Tokenizer(), 0))
    assert found[1::2][:1] == ["Hi!"]
    assert found[-1] == "two\nlines"
    assert len(found) == 5
    assert not {*found} & {*TEST_QUESTIONS}


def test_answers_end_with_the_prompts(monkeypatch):
    monkeypatch.setattr(answers, "prompts", lambda *_: iter(["a", "b"]))
    monkeypatch.setattr(answers.mlx_mtp, "batch_generate", lambda m, t, given, **_: SimpleNamespace(token_ids=given))
    assert [prompt for prompt, _ in answers.conversations(None, Tokenizer(), 0)] == ["a", "b"]
