"""Texts are read from files, chats and strings; the model answers those that have no answer."""

import json
from types import SimpleNamespace

import pytest

from mlx_mtp.training import texts
from mlx_mtp.training.reading import pieces
from mlx_mtp.training.texts import Text, answered, given_texts, read_file

END, ASSISTANT = 0, 1


class Letters:
    """A tokenizer of code points whose chat template refuses messages of the system."""

    has_chat_template, eos_token_id = True, END

    def encode(self, text, add_special_tokens=True):
        return [ord(letter) for letter in text]

    def apply_chat_template(self, messages, **_):
        if any(message["role"] == "system" for message in messages):
            raise RuntimeError("System role\nnot supported")
        return [*self.encode("".join(message["content"] for message in messages)), ASSISTANT]


def codes(text):
    return Letters().encode(text)


USER, ANSWER = {"role": "user", "content": "ask"}, {"role": "assistant", "content": "say"}
WHOLE = Text([*codes("ask"), ASSISTANT, *codes("say"), END], 4)
UNANSWERED = Text([*codes("ask"), ASSISTANT], 4)
LINES = [
    ({"text": "a\u2028b\x85c\nd"}, Text(codes("a\u2028b\x85c\nd"))),
    ({"text": ""}, Text([])),
    ({"prompt": "ask", "completion": "say"}, WHOLE),
    ({"prompt": "ask"}, UNANSWERED),
    ({"messages": [USER, ANSWER]}, WHOLE),
    ({"messages": [USER]}, UNANSWERED),
    ({"messages": [USER, ANSWER, USER]}, Text([*codes("asksayask"), ASSISTANT], 10)),
]


def test_lines_of_a_file(tmp_path):
    file = tmp_path / "lines.jsonl"
    file.write_text("\r\n\n".join(json.dumps(line, ensure_ascii=False) for line, _ in LINES), "utf-8", newline="")
    assert [*read_file(file, Letters())] == [text for _, text in LINES]


def test_everything_that_can_be_given(tmp_path):
    file = tmp_path / "whole.txt"
    file.write_text("a\nb", "utf-8")
    given = [file, "ab", [5, 6], [], [USER, ANSWER], [USER]]
    expected = [Text(codes("a\nb")), Text(codes("ab")), Text([5, 6]), Text([]), WHOLE, UNANSWERED]
    assert [*given_texts(given, Letters())] == expected


SYSTEM = [{"role": "system", "content": "be"}, USER, ANSWER]
BAD = ["[", "[]", "3", "null", '{"a": 1}', '{"text": 1}', '{"messages": []}', '{"messages": 3}', '{"prompt": ""']
BAD += [json.dumps({"messages": messages}) for messages in (SYSTEM, [USER, {"role": "user"}], ["a"])]


@pytest.mark.parametrize("line", BAD)
def test_other_lines_are_refused_with_their_number(line, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text(f'{{"text": "a"}}\n\n{line}\n', "utf-8")
    with pytest.raises(ValueError, match=r"bad\.jsonl: line 3: expected an object with text") as raised:
        [*read_file(file, Letters())]
    assert "\n" not in str(raised.value)


def test_messages_that_the_template_refuses():
    with pytest.raises(ValueError, match="text 2: expected messages that the chat template allows") as raised:
        [*given_texts(["a", SYSTEM], Letters())]
    assert "\n" not in str(raised.value)


def test_three_of_four_answers_are_greedy_and_empty_texts_have_none(monkeypatch):
    waves = []

    def generate(model, tokenizer, prompts, *, max_tokens, sampler=None, return_token_ids):
        waves.append((len(prompts), sampler is not None))
        assert [len(prompt) + most for prompt, most in zip(prompts, max_tokens, strict=True)] == [8] * len(prompts)
        return SimpleNamespace(token_ids=[[prompt[0], END] for prompt in prompts])

    monkeypatch.setattr(texts, "batch_generate", generate)
    asked = [Text([i, ASSISTANT], 2) for i in range(100, 140)]
    found = [*answered([Text([]), WHOLE, *asked, Text([3] * 7, 7)], None, None, 8)]
    assert found[:2] == [Text([]), WHOLE]
    expected = [Text([*text.tokens, text.tokens[0], END], 2) for text in asked]
    assert sorted(found[2:], key=lambda text: text.tokens[0]) == expected
    assert waves == [(24, False), (8, True), (6, False), (2, True)]


def test_all_answers_to_a_prompt_are_on_one_side():
    prompts = [[i, i + 1, 7] for i in range(200)]
    given = [Text([*prompt, *range(i, i + 17)], 3) for i in range(2) for prompt in prompts]
    found = [*pieces(iter(given), 100, 300)]
    assert [text for text, _ in found] == given
    held = [held for _, held in found]
    assert held[:200] == held[200:]
    assert 0 < sum(held[:200]) < 40


def test_long_texts_are_cut_and_short_rests_left_out():
    cut = [(text.tokens, text.answer) for text, _ in pieces(iter([Text([*range(60)], 25)]), 20, 300)]
    assert cut == [([*range(20)], 20), ([*range(20, 40)], 5), ([*range(40, 60)], 0)]
    assert [text.tokens for text, _ in pieces(iter([Text([*range(35)]), Text([1] * 15)]), 20, 300)] == [[*range(20)]]
