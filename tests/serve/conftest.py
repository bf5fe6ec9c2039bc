"""Fixtures: the demo model, served once to clients in this process."""

import sys
from functools import partial

import pytest
import seeing
from letters import Letters
from served import checkpoint, serving


@pytest.fixture(scope="session")
def served():
    with serving(raises=False) as client:
        yield client


@pytest.fixture(scope="session")
def seeing_checkpoint(tmp_path_factory):
    return seeing.build(tmp_path_factory.mktemp("seeing"))[0]


@pytest.fixture(scope="session")
def eyes(seeing_checkpoint):
    """A client of a tiny model that reads pictures."""
    with serving(partial(checkpoint, seeing_checkpoint), raises=False, names=("eyes",)) as client:
        yield client


@pytest.fixture
def chat(served):
    """Return a function that posts a chat completion with a question or with messages."""

    def post(question="What does len do?", **body):
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 30, **body}
        return served.post("/v1/chat/completions", json=body)

    return post


@pytest.fixture
def letters_as_tokenizer(monkeypatch):
    """Make `generate` accept `Letters` as a tokenizer."""
    monkeypatch.setattr(sys.modules["mlx_mtp.generate"], "TokenizerWrapper", Letters)


@pytest.fixture(scope="module")
def small(tiny_models):
    return tiny_models(vocab_size=40)[0]
