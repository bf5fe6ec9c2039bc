"""A model without texts writes different ones, of which some are held out; a model that cannot ends in one line."""

from itertools import count, islice
from types import SimpleNamespace

import families
import mlx.core as mx
import numpy as np
import pytest
from drafters import HEADLESS
from letter_chats import VOCAB, make_tokenizer

import mlx_mtp
from mlx_mtp.training import texts, tune
from mlx_mtp.training.recording import Recording
from mlx_mtp.training.texts import own_texts

TEMPLATES = [None, "{{ '<u>' + messages[0].content + '<a>' }}"]
END = VOCAB["<e>"]


@pytest.fixture
def writes(monkeypatch):
    """Return a function that replaces the model: `write(wave, index)` returns the tokens of a prompt or an answer."""

    def replace(write):
        waves = count()

        def generate(model, tokenizer, prompts, **_):
            wave = next(waves)
            written = [write(wave, i) for i in range(len(prompts))]
            whole = [tokenizer.decode([token for token in tokens if token != END]) for tokens in written]
            return SimpleNamespace(token_ids=written, texts=whole)

        monkeypatch.setattr(texts, "batch_generate", generate)

    return replace


def of_random(length):
    rng = np.random.default_rng(0)
    return lambda wave, index: rng.integers(4, 16, length).tolist()


@pytest.mark.parametrize("template", TEMPLATES)
def test_all_prompts_of_a_model_differ(template, writes):
    writes(of_random(16))
    found = [*islice(own_texts(None, make_tokenizer(template), 40, 0), 600)]
    assert len({tuple(text.tokens[: text.answer]) for text in found}) == 600


UNABLE = {
    "ends at once": (lambda wave, index: [END], 40, "writes only prompts of 0 or of over 38 tokens; give texts"),
    "long prompts": (of_random(16), 8, "writes only prompts of 0 or of over 6 tokens; give texts"),
    "one prompt": (lambda wave, index: [5] * 30, 40, None),
    "short answers": (lambda wave, index: [5 + wave % 7, 5 + index % 9, 5 + wave % 5], 40, None),
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("case", UNABLE)
def test_texts_of_a_model_that_writes_nothing_new_end(case, template, writes):
    write, length, message = UNABLE[case]
    writes(write)
    texts_of = own_texts(None, make_tokenizer(template), length, 0)
    if message is None:
        assert len([*islice(texts_of, 3000)]) < 600
        return
    with pytest.raises(ValueError, match=message) as raised:
        next(texts_of)
    assert "\n" not in str(raised.value)


def test_a_text_needs_a_token_to_begin_with():
    tokenizer = make_tokenizer(None)
    tokenizer._tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no chat template and no token that begins a text"):
        next(own_texts(None, tokenizer, 40, 0))


TARGET = {**HEADLESS["qwen3"], "vocab_size": len(VOCAB), "num_hidden_layers": 2}


def test_a_model_without_a_chat_template_is_tuned_on_texts_that_it_continues(tmp_path, monkeypatch):
    for name, value in {"LENGTH": 40, "DOCUMENT": 40}.items():
        monkeypatch.setattr(tune, name, value)
    documents, real = [], Recording.append

    def append(self, tokens, *arrays, held):
        documents.append((tuple(tokens), held))
        real(self, tokens, *arrays, held=held)

    monkeypatch.setattr(Recording, "append", append)
    model = mlx_mtp.load_model(families.headless(tmp_path / "model", TARGET)[0], kernels="off")
    options = {"new": True, "draft_vocab": None, "bits": None, "tokens": 2000, "epochs": 0.2}
    found = mlx_mtp.tune_heads(model, make_tokenizer(None), out=tmp_path / "new.safetensors", **options)
    assert found.after.positions > 0
    kept, held = ({tokens for tokens, out in documents if out == side} for side in (False, True))
    assert kept
    assert held
    assert not kept & held
    assert sum(len(tokens) for tokens, _ in documents) < 2000 + 40 * tune.MORE


@pytest.mark.parametrize(("count", "held"), [(2, 1), (40, 2)])
def test_documents_of_one_prompt_are_parted(count, held, tmp_path):
    """One in sixteen is held out, at least one, whether the prompt's hash holds out all or none."""
    for all_held in (False, True):
        recording = Recording(tmp_path / str(all_held), {}, 2)
        for _ in range(count):
            rows = mx.zeros((1000, 2))
            recording.append([1] * 1000, rows, mx.zeros(1000, mx.int32), 0, held=all_held)
        work = SimpleNamespace(recording=recording, model=None, progress=None)
        tune._record(work, iter([]), 2000)
        again = Recording(tmp_path / str(all_held), {}, 2)
        assert [d.held for d in again.documents] == [False] * (count - held) + [True] * held
