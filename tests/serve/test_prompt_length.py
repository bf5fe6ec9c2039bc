"""A prompt that cannot fit the context is refused by its first pieces, and none that fits is."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect
from sweep import SWEEP
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mlx_mtp.demo import demo_path
from mlx_mtp.serve import fields, prompts
from mlx_mtp.serve.departure import CURRENT, Departure
from mlx_mtp.serve.prompts import EXCESS, PIECE, TooLong, check_length

PATHS = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/responses": lambda text: {"input": [{"role": "user", "content": text}]},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/messages/count_tokens": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/api/chat": lambda text: {"model": "demo", "messages": [{"role": "user", "content": text}]},
    "/api/generate": lambda text: {"model": "demo", "prompt": text},
    "/api/generate raw": lambda text: {"model": "demo", "prompt": text, "raw": True},
}
SOURCE = ["The quick brown fox jumps over the lazy dog. ", "def len(x):\n    return sum(x)\n", "你好 é 1234"] * 3


def _trained(model, trainer, pre=None, normalizer=None):
    found = Tokenizer(model)
    found.pre_tokenizer, found.normalizer = pre, normalizer
    found.train_from_iterator(SOURCE, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=found)


def _bytes(normalizer=None):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    return _trained(models.BPE(), trainer, pre_tokenizers.ByteLevel(add_prefix_space=False), normalizer)


TOKENIZERS = {
    "the demo": lambda: PreTrainedTokenizerFast.from_pretrained(demo_path()),
    "bytes": _bytes,
    "bytes, composed": lambda: _bytes(normalizers.NFKC()),
    "bytes, stripped": lambda: _bytes(normalizers.Sequence([normalizers.Strip(), normalizers.Replace("  ", " ")])),
    "pieces": lambda: _trained(
        models.BPE(unk_token="?", byte_fallback=True),
        trainers.BpeTrainer(vocab_size=400, special_tokens=["?"], show_progress=False),
        normalizer=normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]),
    ),
    "unigrams": lambda: _trained(
        models.Unigram(),
        trainers.UnigramTrainer(vocab_size=120, unk_token="?", special_tokens=["?"], show_progress=False),
        pre_tokenizers.Metaspace(),
        normalizers.NFKC(),
    ),
    "words": lambda: _trained(
        models.WordPiece(unk_token="?"),
        trainers.WordPieceTrainer(vocab_size=300, special_tokens=["?"], show_progress=False),
        pre_tokenizers.BertPreTokenizer(),
        normalizers.BertNormalizer(),
    ),
}
SOME = st.text("abtTheq .\n1你é\u0301é\u1100\u1161ﬁ<|>", min_size=1, max_size=12)


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def is_long(tokenizer, texts, positions):
    try:
        check_length(tokenizer, texts, positions)
    except TooLong:
        return True
    return False


@settings(max_examples=2000 if SWEEP else 6, deadline=None)
@given(st.lists(SOME, min_size=1, max_size=6), st.integers(0, 3))
@example(["the quick brown "], 0)
@example([" "], 1)
@example(["e\u0301"], 3)
def test_a_text_that_fits_is_never_too_long(tokenizer, runs, shift):
    run = "".join(runs)
    text = "x" * shift + run * (2500 // len(run))  # with cuts anywhere in a run
    tokens = len(tokenizer.encode(text, add_special_tokens=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "PIECE", 1000)
        assert not is_long(tokenizer, [text], tokens)
        assert is_long(tokenizer, [text], tokens // 2) or tokens < 60
        parts = [text[:1500], text[1500:]]
        apart = sum(len(tokenizer.encode(part, add_special_tokens=False)) for part in parts)
        assert not is_long(tokenizer, parts, apart)


class Counted:
    """A tokenizer of one token for each character, which counts these."""

    read = 0

    def encode(self, text, add_special_tokens):
        self.read += len(text)
        return [*range(len(text))]


def test_no_more_is_tokenized_than_the_context_needs():
    tokenizer = Counted()
    with pytest.raises(TooLong, match="at least"):
        check_length(tokenizer, ["a" * 100 * PIECE, "b"], 5 * PIECE)
    assert tokenizer.read <= EXCESS * 5 * PIECE + PIECE
    tokenizer = Counted()
    with pytest.raises(TooLong):
        check_length(tokenizer, ["a"], 100, others=PIECE)
    assert tokenizer.read == 0


def test_tokenizing_sees_a_departure():
    gone = Departure()
    gone.left = True
    token = CURRENT.set(gone)
    try:
        with pytest.raises(ClientDisconnect):
            check_length(Counted(), ["a" * PIECE], PIECE)
    finally:
        CURRENT.reset(token)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("text", ["hello " * 40_000, "<|im_end|>" * 3000, "你" * 50_000])
def test_a_prompt_beyond_the_context_is_refused(one_layer, path, text):
    response = one_layer.post(path.removesuffix(" raw"), json=PATHS[path](text))
    assert response.status_code == 400
    message = json.dumps(response.json())
    assert "prompt is too long: at least " in message
    assert " > 2047 maximum" in message
    if "param" in message:
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert response.json()["error"]["param"] in PATHS[path](text)


def test_what_a_template_drops_is_not_counted(one_layer):
    """Reasoning of earlier answers, and white space around a content, are no tokens of the prompt."""
    messages = [
        {"role": "user", "content": " " * 60_000 + "hi" + "\n" * 60_000},
        {"role": "assistant", "content": "hi", "reasoning_content": "hmm " * 30_000},
        {"role": "user", "content": "hi"},
    ]
    response = one_layer.post("/v1/messages/count_tokens", json={"messages": messages[1:]})
    assert response.status_code == 200
    assert response.json()["input_tokens"] < 100
    prompts.check_length(Counted(), [messages[0]["content"].strip()], 2)


def test_a_prompt_of_too_many_characters_is_refused(one_layer, monkeypatch):
    monkeypatch.setattr(fields, "MOST_CHARACTERS", 1000)
    messages = [{"role": "assistant", "content": "x" * 990}, {"role": "user", "content": "hi"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]
    assert one_layer.post("/v1/chat/completions", json={"messages": messages[1:], "max_tokens": 1}).status_code == 200
    for body in ({"messages": messages, "tools": tools}, {"prompt": "x" * 1001}):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        error = one_layer.post(path, json=body).json()["error"]
        assert "characters; allowed are 1,000" in error["message"]
        assert error["code"] == "context_length_exceeded"
