"""Masks are made in a second thread while the pass is submitted; the thread ends with its decoding loop."""

import gc
import threading
import time

import mlx.core as mx
import pytest
from masked import PROMPT, of_letters, ours

import mlx_mtp
from mlx_mtp import grammar
from mlx_mtp.decoding import cycle_masks, early
from mlx_mtp.decoding.prefill import evaluated
from mlx_mtp.tuning.kernel_fallback import GraphFailed

FREE, FORCED = "(a|b|c){30}", "((a|b)abcabc){9}"
N = 17  # tokens of each answer


def mask_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("mlx-mtp-masks")]


@pytest.fixture
def kept(monkeypatch):
    """Keep every executor, so that only `shutdown` ends its thread."""
    made, real = [], cycle_masks.ThreadPoolExecutor
    monkeypatch.setattr(cycle_masks, "ThreadPoolExecutor", lambda *args: made.append(real(*args)) or made[-1])


def batch_of(model, patterns, **options):
    batch = mlx_mtp.BatchGenerator(model, max_tokens=N, num_draft_tokens=0, **options)
    batch.insert([PROMPT] * len(patterns), grammars=[pattern and of_letters(pattern) for pattern in patterns])
    return batch


def drained(batch):
    found = []
    while responses := batch.next_generated():
        found += [(response.uid, response.token) for response in responses]
    return found


CASES = {
    "plain": lambda model: ours(model, N, of_letters(FREE), 0)[0],
    "forced": lambda model: ours(model, N, of_letters(FORCED), 0, grammar_drafts=5)[0],
    "alone in a batch": lambda model: drained(batch_of(model, [FREE])),
    "batch": lambda model: drained(batch_of(model, [FREE, None, FORCED])),
    "batch, forced": lambda model: drained(batch_of(model, [FREE, FORCED], grammar_drafts=5)),
}


@pytest.mark.parametrize("case", CASES)
def test_masks_are_made_before_the_pass_has_been_submitted(tiny_models, monkeypatch, kept, case):
    model, _ = tiny_models(2)
    expected = CASES[case](model)
    made, submitted, real = threading.Event(), [], grammar.Matcher.fill

    def fill(self, *args, **known):
        found = real(self, *args, **known)
        if threading.current_thread() is not threading.main_thread():
            made.set()
        return found

    def submit(evaluate, *args):
        if evaluate is mx.async_eval:
            submitted.append(all(submitted) and made.wait(10))
            made.clear()
        return evaluated(evaluate, *args)

    monkeypatch.setattr(grammar.Matcher, "fill", fill)
    monkeypatch.setattr(early, "evaluated", submit)
    assert CASES[case](model) == expected
    assert len(submitted) > 3
    assert all(submitted)
    assert mask_threads() == []


class Broken(RuntimeError):
    """Raised by the tests' own code."""


def failing_pass(monkeypatch):
    """Let the fourth submission of a pass fail as if MLX had raised."""
    calls = []

    def submit(evaluate, *args):
        calls.append(evaluate)
        if calls.count(mx.async_eval) == 4:
            raise GraphFailed(Broken("no such kernel"))
        return evaluated(evaluate, *args)

    monkeypatch.setattr(early, "evaluated", submit)


def failing_mask(monkeypatch):
    """Let masks fail from the fourth token on."""
    real = grammar.Matcher.fill

    def fill(self, *args, **known):
        if self.size > 3:
            raise grammar.GrammarError("grammar: too complex")
        return real(self, *args, **known)

    monkeypatch.setattr(grammar.Matcher, "fill", fill)


def test_an_error_waits_for_the_masks_and_comes_before_theirs():
    def write():
        time.sleep(0.05)
        done.append(1)
        raise grammar.GrammarError("grammar: too complex")

    with cycle_masks.mask_thread() as thread:
        for error in (Broken, KeyboardInterrupt):
            done = []
            with pytest.raises(error), early.during(thread, write):
                raise error
            assert done
        with pytest.raises(grammar.GrammarError), early.during(thread, write):
            pass


@pytest.mark.parametrize("failing", [failing_pass, failing_mask])
def test_the_thread_ends_after_an_error(tiny_models, monkeypatch, kept, failing):
    model, _ = tiny_models(2)
    expected = ours(model, N, of_letters(FREE), 0)[0]
    failing(monkeypatch)
    steps = mlx_mtp.generate_step(PROMPT, model, grammar=of_letters(FREE), num_draft_tokens=0, max_tokens=N)
    tokens = []
    with pytest.raises((Broken, grammar.GrammarError)):
        tokens += (token for token, *_ in steps)
    assert tokens
    assert tokens == expected[: len(tokens)]
    assert mask_threads() == []


@pytest.mark.parametrize("failing", [failing_pass, failing_mask])
def test_the_thread_of_a_batch_ends_after_an_error(tiny_models, monkeypatch, kept, failing):
    model, _ = tiny_models(2)
    failing(monkeypatch)
    batch = batch_of(model, [FREE] * 2)
    with pytest.raises((Broken, grammar.GrammarError)):
        drained(batch)
    batch.close()
    assert mask_threads() == []


def test_the_thread_ends_when_the_consumer_leaves(tiny_models):
    model, _ = tiny_models(2)
    steps = mlx_mtp.generate_step(PROMPT, model, grammar=of_letters(FREE), num_draft_tokens=0, max_tokens=N)
    for _ in range(4):
        next(steps)
    assert len(mask_threads()) == 1
    steps.close()
    assert mask_threads() == []
    batch = batch_of(model, [FREE] * 2)
    batch.next_generated()
    batch.next_generated()
    (thread,) = mask_threads()
    del batch
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
