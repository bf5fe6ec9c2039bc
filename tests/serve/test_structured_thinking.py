"""Structured output of models with reasoning: the grammar begins after it, also if the template opened it."""

import functools
import json

import mlx.core as mx
import pytest
import tiny
from compile_mode import NO_FUSE, set_mode
from dictated import ONE_LAYER
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, TokenizerWrapper
from served import serving
from thinking import plain_tokenizer, thinks

import mlx_mtp
from mlx_mtp.serve.server import Loaded

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' + (prompted or '') }}{% endif %}"
)
FRAMED = "{# <|channel|> <|message|> analysis #}" + TEMPLATE
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
JSON = '{"a": 2}'
REASONING = "is {1} it"


class Dictated:
    """A logits processor that makes the model emit `pieces`, each with its own tokens, as far as it may.

    A token that it cannot emit is skipped. Behind the pieces it emits "!" for ever.
    """

    pieces = ()

    def __init__(self, tokenizer):
        self.encoded = functools.cache(lambda text: tokenizer.encode(text, add_special_tokens=False))

    def __call__(self, tokens, logits):
        words = [token for piece in self.pieces for token in self.encoded(piece)]
        ids, mark = tokens.tolist(), self.encoded("<|im_start|>assistant\n")
        start = next(i for i in range(len(ids), 0, -1) if ids[i - len(mark) : i] == mark)
        done = ids[start + len(self.encoded(self.prompted)) :]
        (other,) = self.encoded("!")
        token = words[len(done)] if len(done) < len(words) else other
        return mx.where(mx.arange(logits.shape[-1]) == token, 0.0, -1e9)[None]


@pytest.fixture(scope="module", params=[False, True], ids=["thinks", "framed"])
def framed(request):
    return request.param


@pytest.fixture(scope="module")
def client(tmp_path_factory, framed):
    config = {**tiny.CONFIG, **ONE_LAYER, "vocab_size": 2048}
    path = tiny.save(tmp_path_factory.mktemp("tiny"), config, tiny.random_weights(config))

    def load():
        set_mode(NO_FUSE)
        model, plain = mlx_mtp.load_model(path), plain_tokenizer()
        plain.chat_template = FRAMED if framed else TEMPLATE
        tokenizer = TokenizerWrapper(plain, BPEStreamingDetokenizer)
        if not framed:
            thinks(tokenizer)
        options["logits_processors"] = [Dictated(tokenizer)]
        return Loaded(model, tokenizer, {}, {})

    options = {"adaptive": False, "num_draft_tokens": 1}
    with serving(load, options=options) as client:
        yield client


def chat(client, pieces, prompted="", *, streamed=False, **body):
    Dictated.pieces, Dictated.prompted = pieces, prompted
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    body = {"messages": [{"role": "user", "content": "Think."}], "response_format": form, "max_tokens": 60, **body}
    body["chat_template_kwargs"] = {"prompted": prompted}
    choice = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    message = {"reasoning_content": "", **choice["message"]}
    if streamed:
        lines = client.post("/v1/chat/completions", json={**body, "stream": True}).text.splitlines()
        deltas = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
        for name in ("content", "reasoning_content"):
            assert "".join(each["delta"].get(name) or "" for each in deltas) == message[name]
        assert deltas[-1]["finish_reason"] == choice["finish_reason"]
    return message["reasoning_content"], message["content"], choice["finish_reason"]


FRAME = "<|channel|>final<|message|>"
THOUGHTS = {  # per kind of model: what the prompt ends with, what the model writes before its content
    False: [("", ["<think>", REASONING, "</think>"]), ("<think>\n", [REASONING, "</think>"])],
    True: [
        ("", ["<|channel|>analysis<|message|>", REASONING, "<|end|>", "<|start|>assistant", FRAME]),
        ("<|channel|>analysis<|message|>", [REASONING, "<|end|>", "<|start|>assistant", FRAME]),
    ],
}


@pytest.mark.parametrize("case", [0, 1])
def test_the_grammar_begins_behind_the_reasoning(client, framed, case):
    prompted, thoughts = THOUGHTS[framed][case]
    assert chat(client, [*thoughts, JSON], prompted, streamed=True) == (REASONING, JSON, "stop")
    if framed:
        return
    reasoning, content, reason = chat(client, [*thoughts, "No JSON"], prompted)
    assert (reasoning, reason) == (REASONING, "stop")
    assert json.loads(content)["a"] in (1, 2)


def test_without_reasoning_the_grammar_begins_with_the_answer(client, framed):
    closed = FRAME if framed else "<think>\n\n</think>\n\n"
    assert chat(client, [JSON], closed) == ("", JSON, "stop")
    reasoning, content, _ = chat(client, ["<think>hm</think>"], closed)
    assert (reasoning, json.loads(content)["a"] in (1, 2)) == ("", True)
    if not framed:
        assert chat(client, [JSON]) == ("", JSON, "stop")


def test_reasoning_that_does_not_end_is_cut_by_length(client, framed):
    prompted, _ = THOUGHTS[framed][1]
    reasoning, content, reason = chat(client, ["hm <|im_end|>"], prompted, max_tokens=20)
    assert (content, reason) == ("", "length")
    assert reasoning.startswith("hm ")
