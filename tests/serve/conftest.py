"""Fixtures: the demo model, served once to clients in this process."""

from functools import partial

import pytest
import seeing
import tiny
from compile_mode import NO_FUSE, set_mode
from dictated import ONE_LAYER
from mlx_lm.tokenizer_utils import load as load_tokenizer
from served import checkpoint, serving

import mlx_mtp
from mlx_mtp.demo import demo_path
from mlx_mtp.serve.server import Loaded


@pytest.fixture(scope="session")
def served():
    with serving(raises=False) as client:
        yield client


@pytest.fixture(scope="session")
def load_one_layer(tmp_path_factory):
    """Return a function that loads a random model of one layer, with the demo's tokenizer and longest context."""
    other = {**tiny.CONFIG["attention_other_setting"], "head_dim": 32}  # which quantized caches support
    config = {**tiny.CONFIG, **ONE_LAYER, "vocab_size": 2048, "max_position_embeddings": 2048, "head_dim": 32}
    config |= {"attention_other_setting": other}
    path = tiny.save(tmp_path_factory.mktemp("one-layer"), config, tiny.random_weights(config))

    def load():
        set_mode(NO_FUSE)
        return mlx_mtp.load_model(path), load_tokenizer(demo_path(), eos_token_ids=[0, 2])

    return load


@pytest.fixture(scope="session")
def one_layer(load_one_layer):
    """A client of the model of `load_one_layer`, for requests whose answers need not be the demo's words."""
    options = {"adaptive": False, "num_draft_tokens": 1}
    with serving(lambda: Loaded(*load_one_layer(), {}, {}), raises=False, options=options) as client:
        yield client


@pytest.fixture(scope="session")
def seeing_checkpoint(tmp_path_factory):
    return seeing.build(tmp_path_factory.mktemp("seeing"))[0]


@pytest.fixture(scope="session")
def eyes(seeing_checkpoint):
    """A client of a tiny model that reads pictures."""
    with serving(partial(checkpoint, seeing_checkpoint), raises=False, names=("eyes",)) as client:
        yield client


def ask(client, question="What does len do?", **body):
    """Post a chat completion with a question or with messages."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 30, **body}
    return client.post("/v1/chat/completions", json=body)


@pytest.fixture
def chat(served):
    """Return `ask` for the demo."""
    return partial(ask, served)


@pytest.fixture
def random_chat(one_layer):
    """Return `ask` for the model of `one_layer`."""
    return partial(ask, one_layer)


@pytest.fixture(scope="module")
def small(tiny_models):
    return tiny_models(vocab_size=40, **tiny.TWO_LAYERS)[0]


@pytest.fixture
def small_pieces(monkeypatch):
    """Files of prefixes are written in pieces of 1,000 bytes."""
    monkeypatch.setattr("mlx_mtp.serve.chunk_file.PIECE", 1000)
