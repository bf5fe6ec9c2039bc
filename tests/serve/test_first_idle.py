"""The row comparison runs in the first idle time, not before the model is ready; no decoded row is stored before."""

import time

import mlx.core as mx
import pytest
from letter_chats import make_tokenizer
from prefix_requests import rows_alike
from served import settings

import mlx_mtp
from mlx_mtp.serve import engine as engines
from mlx_mtp.serve.engine import Engine
from mlx_mtp.serve.job import DecodeRequest, End, Job
from mlx_mtp.serve.prefixes import comparisons
from mlx_mtp.serve.server import Loaded, shared

PASSES = 7  # a chunk; its rows before the last four; these one by one; and at once
STEP = 24
PROMPT = [*range(4, 16), *range(4, 14)]


@pytest.fixture
def passes(tiny_models, monkeypatch):
    """Return a model and a list of the row counts of its forward passes."""
    model, counted = tiny_models(vocab_size=40)[0], []
    hidden = type(model).hidden

    def counting(self, tokens, cache):
        if self is model:
            counted.append(tokens.shape[1])
        return hidden(self, tokens, cache)

    monkeypatch.setattr(type(model), "hidden", counting)
    return model, counted


@pytest.fixture
def start():
    """Return a function that starts the engine of a model and calls `at_ready` when it is ready."""
    engines = []

    def begin(model, at_ready=lambda: None, **changes):
        options = {"num_draft_tokens": 2, "adaptive": False}
        given = settings(options=options, step=STEP, **changes)
        engines.append(Engine(lambda: shared(Loaded(model, make_tokenizer(), {}, {}), given), ready=at_ready))
        engines[-1].thread.start()
        return engines[-1]

    yield begin
    for engine in engines:
        engine.stop(0)
        engine.thread.join(10)
        assert not engine.thread.is_alive()


def until(found) -> None:
    end = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end
        time.sleep(0.001)


def answered(engine) -> str:
    """Return five letters after PROMPT."""
    events = []
    engine.submit([job := Job(DecodeRequest(PROMPT, max_tokens=5), events.append)])
    until(lambda: job.finished)
    assert isinstance(events[-1], End)
    return "".join(getattr(event, "text", "") for event in events)


def test_no_pass_runs_before_the_model_is_ready_and_seven_run_when_idle(passes, start):
    model, counted = passes
    at_ready = []
    engine = start(model, lambda: at_ready.append(len(counted)))
    until(lambda: len(counted) == PASSES)
    assert at_ready == [0]
    until(lambda: engine.served.tree.decoded)
    assert counted == [STEP, STEP - 4, 1, 1, 1, 1, 4]
    assert rows_alike(model, engine.served.tree.blank, STEP)


def test_a_16_bit_model_and_a_server_without_prefix_cache_need_no_pass(passes, monkeypatch):
    model, _ = passes
    blank = mlx_mtp.make_prompt_cache(model)
    row = model.no_hidden().astype(mx.bfloat16)
    monkeypatch.setattr(type(model), "no_hidden", lambda _: row)
    monkeypatch.setattr(mx, "eval", lambda *_: pytest.fail("a pass is computed"))
    assert list(comparisons(model, blank, STEP)) == [False]
    served = shared(Loaded(model, make_tokenizer(), {}, {}), settings(cache_bytes=0))
    assert served.tree.decoded is False


def test_a_response_is_the_same_before_during_and_after_the_comparison(passes, start, monkeypatch):
    """A request waits for at most one pass, and no decoded row is stored until the last one."""
    model, counted = passes
    text = answered(start(model, cache_bytes=0))
    counted.clear()
    engine = start(model)
    until(lambda: counted)
    monkeypatch.setattr(engines, "QUIET", 1000)
    assert answered(engine) == text
    assert not engine.served.tree.decoded
    monkeypatch.setattr(engines, "QUIET", 0.001)
    assert answered(engine) == text  # which ends the wait for quiet time
    until(lambda: engine.served.tree.decoded)
    assert answered(engine) == text
