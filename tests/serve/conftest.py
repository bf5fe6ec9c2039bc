"""Fixtures: the demo model, served once to clients in this process."""

import sys

import pytest
from letters import Letters
from served import serving


@pytest.fixture(scope="session")
def served():
    with serving(raises=False) as client:
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
