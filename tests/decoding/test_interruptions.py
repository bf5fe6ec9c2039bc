"""An interruption anywhere in a cycle leaves correct caches."""

from dataclasses import replace

import mlx.core as mx
import pytest
from oracle import Spy
from plans import Listed, follow
from subjects import PLANS, PROMPT, Subject, assert_same_rows, quantizable_model, steps, subjects, text_of
from sweep import SWEEP, sweep

import mlx_mtp
from mlx_mtp.cache.prompt_cache import PromptCache
from mlx_mtp.decoding import build, step
from mlx_mtp.decoding.clock import Clock
from mlx_mtp.decoding.drafters.heads import Heads
from mlx_mtp.decoding.drafters.lookup import Lookup
from mlx_mtp.decoding.driver import Driver
from mlx_mtp.decoding.history import TokenHistory
from mlx_mtp.decoding.run import Drafts, Run
from mlx_mtp.tuning.plan import Plan


@pytest.fixture(scope="module")
def subject(tiny_models, tmp_path_factory):
    return subjects(tiny_models, tmp_path_factory)


@pytest.fixture(scope="module")
def quantizable(tiny_models):
    return quantizable_model(tiny_models)


POINTS = [
    (Heads, "propose"),
    (Heads, "read"),
    (step, "accept"),
    (mx, "eval"),
    (mx, "async_eval"),
    (Run, "read"),
    (Lookup, "propose"),
    (TokenHistory, "matched"),
    (TokenHistory, "extend"),
    (Drafts, "sure"),
    (Clock, "arrived"),
    (step, "pick"),
    (Listed, "plan"),
    (Listed, "observe"),
    *(
        (PromptCache, name)
        for name in ("push", "resume_heads", "pause_heads", "advance", "quantize_at", "to_host", "load", "unload")
    ),
]


class Interruption:
    """Raises KeyboardInterrupt in the n-th call of any of POINTS, before or after its work; counts the calls."""

    def __init__(self, monkeypatch, model, n: int, after: bool):
        self.n, self.after, self.calls, self.where = n, after, 0, None
        for owner, name in (*POINTS, (type(model), "hidden")):
            monkeypatch.setattr(owner, name, self.wrapped(f"{owner.__name__}.{name}", getattr(owner, name)))
        close = Driver.close
        monkeypatch.setattr(Driver, "close", lambda driver: (self.stop(), close(driver)))

    def stop(self):
        """Stop counting: the cleanup is not interrupted."""
        self.n = 0

    def wrapped(self, where: str, real):
        def call(*args, **kwargs):
            self.calls += self.n != 0
            hit = self.calls == self.n
            if hit and not self.after:
                self.stop()
                self.where = where
                raise KeyboardInterrupt
            result = real(*args, **kwargs)
            if hit:
                self.stop()
                self.where = where
                raise KeyboardInterrupt
            return result

        return call


MIXED = ["heads", "heads", "lookup", "plain", "plain", "heads", "sure", "sure", "plain", "lookup", "lookup", "sure"]


def interrupted(s: Subject, monkeypatch, n: int, after: bool, **options):
    """Return (tokens, cache, interrupted function) of a generation that the n-th call of any of POINTS ends."""
    cache, shown = mlx_mtp.make_prompt_cache(s.model, **options), []
    plans = [replace(PLANS[name], k=min(PLANS[name].k, s.k)) for name in MIXED]
    with monkeypatch.context() as patch:
        follow(patch, Listed(plans))
        break_ = Interruption(patch, s.model, n, after)
        try:
            for token, _, _ in steps(s.model, PROMPT, s.k, max_tokens=24, prefill_step_size=4, prompt_cache=cache):
                shown.append(token)
        except KeyboardInterrupt:
            pass
    return shown, cache, break_


def assert_whole(s: Subject, monkeypatch, shown: list[int], cache: PromptCache, truth: list[int]) -> None:
    """The cache is as after plain decoding of the yielded tokens, and drafts from there are exact."""
    assert shown == truth[: len(shown)]
    if shown:
        assert cache.tokens == PROMPT + shown[:-1]
        assert_same_rows(s.model, cache, s.read(tuple(cache.tokens)))
    held = len(cache.tokens)
    assert cache.tokens == (PROMPT + shown)[:held]
    assert cache.primed <= held
    if cache.reach is None:
        assert cache.primed + cache.pending_rows == held
    rest = (PROMPT + shown)[held:] or [truth[len(shown)]]
    with monkeypatch.context() as patch:
        spy = Spy(patch, s.model)
        follow(patch, Listed([PLANS["heads"] if s.k == 3 else Plan("heads", s.k)]))
        goes_on = text_of(s.model, rest, s.k, max_tokens=8, prompt_cache=cache)
    begun = (PROMPT + truth)[: held + len(rest)]
    assert goes_on == (PROMPT + truth)[len(begun) :][:8]
    s.assert_drafts(spy, begun + goes_on, least=2, most=2)


def truth_of(s: Subject, n: int = 40) -> list[int]:
    """Return the first n tokens after PROMPT, which one cacheless forward confirms."""
    return s.truth(tuple(PROMPT), n, tuple(text_of(s.model, PROMPT, 0, max_tokens=n, prompt_lookup=False)))


def all_calls(s, monkeypatch, **options) -> int:
    with monkeypatch.context() as patch:
        return interrupted(s, patch, -1, False, **options)[2].calls


def assert_interruptible(s: Subject, monkeypatch, first: int, stride: int, *, after: bool, **options) -> None:
    """Interrupt the call number `first`, and every `stride`-th call after it."""
    truth = truth_of(s)
    for n in range(first, all_calls(s, monkeypatch, **options) + 1, stride):
        shown, cache, interruption = interrupted(s, monkeypatch, n, after, **options)
        assert interruption.where
        try:
            assert_whole(s, monkeypatch, shown, cache, truth)
        except Exception as e:
            raise AssertionError(f"call {n}, {'after' if after else 'before'} {interruption.where}") from e


MORE = [pytest.param(name, 29, after, marks=sweep) for name, after in (("eagle", False), ("qwen3_5", True))]
MORE.append(pytest.param("step3p5", 3, False, marks=sweep))


@pytest.mark.parametrize(("name", "first", "after"), [("nemotron_h", 29, True), *MORE])
def test_interrupted_anywhere(subject, monkeypatch, name, first, after):
    assert_interruptible(subject(name), monkeypatch, first, 97, after=after)


@sweep
@pytest.mark.parametrize("name", ["step3p5", "qwen3_5", "nemotron_h", "deepseek_v32", "mimo_v2_flash", "eagle"])
@pytest.mark.parametrize("after", [False, True])
def test_interrupted_everywhere(subject, monkeypatch, name, after):
    assert_interruptible(subject(name), monkeypatch, 1, 1, after=after)


@pytest.mark.parametrize("where", ["before", "after"])
def test_interrupted_after_a_plain_row_is_read_before_its_token_is_yielded(subject, monkeypatch, where):
    """The row counts as not read: the recurrent state before it must be restored."""
    s = subject("nemotron_h")
    truth = truth_of(s)
    for at in (3,):
        cache, shown, submitted = mlx_mtp.make_prompt_cache(s.model), [], []
        with monkeypatch.context() as patch:

            def interrupt(*args, real=build.start, submitted=submitted, at=at):
                submitted.append(1)
                if where == "after":
                    real(*args)
                if len(submitted) == at:
                    raise KeyboardInterrupt
                real(*args)

            follow(patch, Listed([Plan()]))
            patch.setattr(build, "start", interrupt)
            with pytest.raises(KeyboardInterrupt):
                shown.extend(token for token, _, _ in steps(s.model, PROMPT, 3, prompt_cache=cache))
        assert_whole(s, monkeypatch, shown, cache, truth)


@pytest.mark.parametrize("where", ["before", pytest.param("after", marks=sweep)])
@pytest.mark.parametrize("name", ["propose", "start"])
def test_interrupted_where_caches_are_quantized(quantizable, monkeypatch, name, where):
    """A cache that is restored to a position before its quantization is quantized later."""
    model, plain = quantizable
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": len(PROMPT) + 6}
    truth = plain((*options.items(), ("max_tokens", 44)))
    for at in [at for at in range(2, 8) if SWEEP or at % 2 == (name == "start")]:
        cache, shown, calls = mlx_mtp.make_prompt_cache(model, **options), [], []
        with monkeypatch.context() as patch:
            owner = Heads if name == "propose" else build
            real = getattr(owner, name)

            def interrupt(*args, real=real, calls=calls, at=at):
                calls.append(1)
                done = real(*args) if where == "after" or len(calls) != at else None
                if len(calls) == at:
                    raise KeyboardInterrupt
                return done

            follow(patch, Listed([PLANS["heads"]]))
            patch.setattr(owner, name, interrupt)
            with pytest.raises(KeyboardInterrupt):
                shown.extend(token for token, _, _ in steps(model, PROMPT, 3, prompt_cache=cache, max_tokens=50))
        rest = (PROMPT + shown)[len(cache.tokens) :] or truth[:1]
        done = len(cache.tokens) + len(rest) - len(PROMPT)
        assert text_of(model, rest, 3, prompt_cache=cache, max_tokens=12) == truth[done : done + 12], at
        assert all(hasattr(c, "bits") for c in cache.layers)


@pytest.mark.parametrize("name", ["step3p5", "qwen3_5"])
def test_interrupted_where_the_first_token_is_read(subject, monkeypatch, name):
    """The prompt's last row, which is being computed, is not lost for the heads."""
    s, shown = subject(name), []
    cache = mlx_mtp.make_prompt_cache(s.model)
    with monkeypatch.context() as patch:
        patch.setattr(Run, "read", lambda run: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(steps(s.model, PROMPT, s.k, prompt_cache=cache))
    assert cache.tokens == PROMPT
    assert cache.primed + cache.pending_rows == len(PROMPT)
    assert_whole(s, monkeypatch, shown, cache, truth_of(s))
