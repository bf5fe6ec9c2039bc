"""Any plan follows any plan: the text is the target's, drafts are exact, and a stop anywhere leaves whole caches."""

import functools
import itertools
import os
from dataclasses import replace

import drafters
import families
import mlx.core as mx
import pytest
import test_drafter
import tiny
from plans import Listed, Script, Spy, follow
from test_families import drafts_from_scratch

import mlx_mtp
from mlx_mtp import cycle, decode
from mlx_mtp import prefill as reading
from mlx_mtp.controller import Plan
from mlx_mtp.draft import Run
from mlx_mtp.lookup import Text
from mlx_mtp.prompt_cache import PromptCache
from mlx_mtp.sampling import Picker
from mlx_mtp.stats import Stats

PROMPT = [1, 2, 3, 0, 2, 2, 1, 3, 0, 1, 2]


class Subject:
    """A tiny model with its cacheless truths. name: a family, or "eagle" (three layers' rows, recycled)."""

    def __init__(self, name: str, tiny_models, path):
        self.name = name
        if name == "step3p5":
            self.model, self.plain = tiny_models(2, vocab_size=5)
        elif name == "eagle":
            directory, self.plain = families.headless(path / "target", test_drafter.HEADLESS["llama_sliding"], 0)
            self.weights = drafters.weights(drafters.CONFIG, families.H)
            drafter = tiny.save(path / "drafter", drafters.CONFIG, self.weights)
            self.model = mlx_mtp.load_model(directory, draft_model=drafter)
        else:
            directory, _, self.plain = families.build(name, path)
            self.model = mlx_mtp.load_model(directory)
        self.k = min(3, self.model.max_draft_tokens)
        self.truth = functools.cache(self._truth)
        self.read = functools.cache(self._read)

    def _truth(self, prompt: tuple[int, ...], n: int = 60) -> list[int]:
        return tiny.greedy(self.plain, list(prompt), n)

    def _read(self, tokens: tuple[int, ...]) -> PromptCache:
        """A cache that has read these tokens and nothing else."""
        cache = mlx_mtp.make_prompt_cache(self.model)
        list(mlx_mtp.generate_step(list(tokens), self.model, prompt_cache=cache, max_tokens=0, num_draft_tokens=0))
        return cache

    def scratch(self, known: list[int], k: int) -> list[int]:
        """k drafts after known tokens, without a cache."""
        if self.name == "eagle":
            options = {"layer": "midlayer", "counts": self.model.spec.capture, "new": False}
            return test_drafter.drafts_from_scratch(self.plain, self.weights, known, k, **options)
        return drafts_from_scratch(self.model, self.plain, known, k)

    def assert_drafts(self, spy: Spy, text: list[int], least: int = 1, most: int = 10**9) -> None:
        """Of the calls that a spy saw, up to `most` spread over all of them."""
        found = spy.drafts(text)
        assert len(found) >= least
        for known, drafts in found[:: -(-len(found) // most) or 1]:
            assert drafts == self.scratch(text[:known], len(drafts)), f"{known} tokens"


@pytest.fixture(scope="module")
def subject(tiny_models, tmp_path_factory):
    return functools.cache(lambda name: Subject(name, tiny_models, tmp_path_factory.mktemp("subject")))


def steps(model, prompt, k, **options):
    options = {"max_tokens": 60, "draft_p_min": 0.25, "prompt_lookup": True} | options
    return mlx_mtp.generate_step(prompt, model, num_draft_tokens=k, **options)


def text_of(model, prompt, k, **options) -> list[int]:
    return [token for token, _, _ in steps(model, prompt, k, **options)]


# The window is 8: it wraps in the prompt of 30, while 60 tokens are generated, and inside verifies.
@pytest.mark.parametrize(("length", "seed"), [(1, 0), (7, 1), (30, 2), (30, 3)])
def test_any_plan_follows_any_plan(subject, monkeypatch, length, seed):
    s = subject("step3p5")
    mx.random.seed(length)
    prompt = mx.random.randint(0, 5, (length,)).tolist()
    script, spy, stats = Script(seed, max_drafts=3, p_min=True), Spy(monkeypatch), Stats()
    follow(monkeypatch, script)
    text = text_of(s.model, prompt, 3, prefill_step_size=(5, 2048)[seed % 2], stats=stats)
    assert text == s.truth(tuple(prompt))
    s.assert_drafts(spy, prompt + text, least=5, most=8)
    kinds = [(c.plan.source, c.plan.p_min, c.plan.k > 0) for c in script.cycles]
    assert {(source, k) for source, _, k in kinds} == {("heads", True), ("heads", False), ("lookup", True)}
    assert len(set(itertools.pairwise(kinds))) >= 8
    assert any(c.caught_up for c in script.cycles)


NAMES = ["qwen3_5", "qwen3_next", "glm4_moe", "deepseek_v3", "deepseek_v32", "glm_moe_dsa_shared", "mimo"]
NAMES += ["mimo_v2_flash", "nemotron_h_latent", "eagle"]
OTHERS = [name for name in families.FAMILIES if name not in NAMES]


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_every_family(subject, monkeypatch, name):
    s = subject(name)
    script, spy = Script(len(name), max_drafts=s.k, p_min=True), Spy(monkeypatch)
    follow(monkeypatch, script)
    text = text_of(s.model, PROMPT, s.k, max_tokens=30, prefill_step_size=4)
    assert text == s.truth(tuple(PROMPT), 30)
    s.assert_drafts(spy, PROMPT + text, least=3, most=4)
    assert any(c.caught_up for c in script.cycles)


PLANS = {
    "plain": Plan(),
    "heads": Plan("heads", 3),
    "lookup": Plan("lookup", 2),
    "sure": Plan("heads", 3, p_min=True),
}


SLOW_CASES = [
    pytest.param(by, idle, marks=pytest.mark.slow) for by, idle in (("plain", 40), ("plain", 100), ("lookup", 100))
]


@pytest.mark.parametrize(("by", "idle"), [("plain", 1), ("lookup", 5), ("plain", 88), ("lookup", 40), *SLOW_CASES])
def test_heads_that_were_idle_draft_as_if_they_had_not_been(subject, monkeypatch, by, idle):
    """More rows than the windows of 8 see, than their rings have room for, and than one chunk of reading; of 88 rows
    all are dropped but the 24 that the windows can see.
    """
    s, spy = subject("step3p5"), Spy(monkeypatch)
    plans = [PLANS["heads"]] * 2 + [PLANS[by]] * idle
    control = Listed(plans)
    follow(monkeypatch, control)
    text = text_of(s.model, PROMPT, 3, max_tokens=3 * len(plans), prefill_step_size=7)
    caught_up = [c.caught_up for c in control.cycles if c.caught_up]
    assert caught_up[0] == len(PROMPT) - 1
    assert min(caught_up[1:]) >= min(idle, 24)  # of more, the windows see no more than so many
    s.assert_drafts(spy, PROMPT + text, least=4, most=12)


POINTS = [
    (cycle, "draft"),
    (cycle, "prime"),
    (reading, "prime"),
    (cycle, "accept"),
    (mx, "eval"),
    (mx, "async_eval"),
    (Run, "read"),
    (Text, "continued"),
    (Text, "matched"),
    (Text, "extend"),
    (Stats, "reads_confidence"),
    (Stats, "builds_late"),
    (Picker, "pick"),
    (Listed, "plan"),
    (Listed, "observe"),
    *((PromptCache, name) for name in ("push", "wake", "idle", "advance", "quantize_at", "to_host", "bound")),
]


class Interruption:
    """Raises KeyboardInterrupt in the n-th call of any of POINTS, before it or behind it; counts the calls."""

    def __init__(self, monkeypatch, model, n: int, behind: bool):
        self.n, self.behind, self.calls, self.where = n, behind, 0, None
        for owner, name in (*POINTS, (type(model), "hidden")):
            monkeypatch.setattr(owner, name, self.wrapped(f"{owner.__name__}.{name}", getattr(owner, name)))
        settle = decode._settle
        monkeypatch.setattr(decode, "_settle", lambda *args: (self.stop(), settle(*args)))

    def stop(self):
        """Count no more: what is cleaned up is not interrupted."""
        self.n = 0

    def wrapped(self, where: str, real):
        def call(*args, **kwargs):
            self.calls += self.n != 0
            hit = self.calls == self.n
            if hit and not self.behind:
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


def interrupted(s: Subject, monkeypatch, n: int, behind: bool, **options):
    """(what was shown, the cache, where) of a generation that the n-th call of any of POINTS ends."""
    cache, shown = mlx_mtp.make_prompt_cache(s.model, **options), []
    plans = [replace(PLANS[name], k=min(PLANS[name].k, s.k)) for name in MIXED]
    with monkeypatch.context() as patch:
        follow(patch, Listed(plans))
        break_ = Interruption(patch, s.model, n, behind)
        try:
            for token, _, _ in steps(s.model, PROMPT, s.k, max_tokens=24, prefill_step_size=4, prompt_cache=cache):
                shown.append(token)
        except KeyboardInterrupt:
            pass
    return shown, cache, break_


def assert_whole(s: Subject, monkeypatch, shown: list[int], cache: PromptCache, truth: list[int]) -> None:
    """A cache is as if what was shown had been decoded one by one, and drafts on from there are exact."""
    assert shown == truth[: len(shown)]
    if shown:
        assert cache.tokens == PROMPT + shown[:-1]
        assert_same_rows(s.model, cache, s.read(tuple(cache.tokens)))
    held = len(cache.tokens)
    assert cache.tokens == (PROMPT + shown)[:held]
    assert cache.primed <= held
    if cache.reach is None:
        assert cache.primed + cache.behind == held
    rest = (PROMPT + shown)[held:] or [truth[len(shown)]]
    with monkeypatch.context() as patch:
        spy = Spy(patch)
        follow(patch, Listed([PLANS["heads"] if s.k == 3 else Plan("heads", s.k)]))
        goes_on = text_of(s.model, rest, s.k, max_tokens=8, prompt_cache=cache)
    begun = (PROMPT + truth)[: held + len(rest)]
    assert goes_on == (PROMPT + truth)[len(begun) :][:8]
    s.assert_drafts(spy, begun + goes_on, least=2, most=2)


def assert_same_rows(model, ours: PromptCache, theirs: PromptCache) -> None:
    """The target's keys and values, and its recurrent states, at the same position."""
    mixers = iter(m for layer in model.layers for _, m in layer.named_modules() if hasattr(m, "_replay"))
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert a.offset == b.offset == ours.offset
        if a.window == "recurrent":
            mixer = next(mixers)
            pairs = [(a.state(mixer._replay), b.state(mixer._replay)), (rows_before(a), rows_before(b))]
        else:
            last = range(max(0, a.offset - (a.window or a.offset)), a.offset)
            slots = mx.array([p % a.ring.slots if hasattr(a, "ring") else p for p in last])
            pairs = [
                (mx.take(p, slots, axis=2), mx.take(q, slots, axis=2)) for p, q in zip(a.parts, b.parts, strict=True)
            ]
        for x, y in pairs:
            assert mx.allclose(x, y, rtol=1e-3, atol=1e-4), type(a).__name__


def rows_before(cache) -> mx.array:
    """What the convolution of a recurrent layer, here of four taps, reads before the next row."""
    blank = mx.zeros((1, 1, cache.parts[2].shape[2]))
    return cache.convolved(blank, 4)[:, :3]


def all_calls(s, monkeypatch, **options) -> int:
    with monkeypatch.context() as patch:
        return interrupted(s, patch, -1, False, **options)[2].calls


SWEEP = pytest.mark.skipif(os.environ.get("MLX_MTP_SWEEP") != "1", reason="minutes: MLX_MTP_SWEEP=1 runs it")


def assert_interruptible(s: Subject, monkeypatch, first: int, stride: int, *, behind: bool, **options) -> None:
    """At the first-th of all calls, and each stride-th from there on."""
    truth = s.truth(tuple(PROMPT))
    for n in range(first, all_calls(s, monkeypatch, **options) + 1, stride):
        shown, cache, interruption = interrupted(s, monkeypatch, n, behind, **options)
        assert interruption.where
        try:
            assert_whole(s, monkeypatch, shown, cache, truth)
        except Exception as e:
            raise AssertionError(f"call {n}, {'behind' if behind else 'before'} {interruption.where}") from e


MORE = [
    pytest.param(name, 29, behind, marks=pytest.mark.slow) for name, behind in (("eagle", False), ("qwen3_5", True))
]


@pytest.mark.parametrize(("name", "first", "behind"), [("step3p5", 3, False), ("nemotron_h", 29, True), *MORE])
def test_interrupted_anywhere(subject, monkeypatch, name, first, behind):
    assert_interruptible(subject(name), monkeypatch, first, 97, behind=behind)


@SWEEP
@pytest.mark.parametrize("name", ["step3p5", "qwen3_5", "nemotron_h", "deepseek_v32", "mimo_v2_flash", "eagle"])
@pytest.mark.parametrize("behind", [False, True])
def test_interrupted_everywhere(subject, monkeypatch, name, behind):
    assert_interruptible(subject(name), monkeypatch, 1, 1, behind=behind)


@pytest.mark.parametrize("where", ["before", "behind"])
def test_interrupted_where_a_plain_row_was_read_but_not_shown(subject, monkeypatch, where):
    """Its state is final and has to come back: the row counts as not read."""
    s, truth = subject("nemotron_h"), subject("nemotron_h").truth(tuple(PROMPT))
    for at in (3,):
        cache, shown, submitted = mlx_mtp.make_prompt_cache(s.model), [], []
        with monkeypatch.context() as patch:

            def interrupt(*args, real=cycle.start, submitted=submitted, at=at):
                submitted.append(1)
                if where == "behind":
                    real(*args)
                if len(submitted) == at:
                    raise KeyboardInterrupt
                real(*args)

            follow(patch, Listed([Plan()]))
            patch.setattr(cycle, "start", interrupt)
            with pytest.raises(KeyboardInterrupt):
                shown.extend(token for token, _, _ in steps(s.model, PROMPT, 3, prompt_cache=cache))
        assert_whole(s, monkeypatch, shown, cache, truth)


@pytest.fixture(scope="module")
def quantizable(tiny_models):
    """A model of head size 32, and its texts by plain decoding, which quantizing changes."""
    model, _ = tiny_models(0, head_dim=32, vocab_size=5)
    return model, functools.cache(lambda options: text_of(model, PROMPT, 0, prompt_lookup=False, **dict(options)))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("start", [0, 12, 30])
def test_quantizing_in_the_middle(quantizable, monkeypatch, start, seed):
    model, plain = quantizable
    options = {"kv_bits": (4, 8)[seed % 2], "kv_group_size": 32, "quantized_kv_start": start}
    expected = plain(tuple(options.items()))
    follow(monkeypatch, Script(seed, max_drafts=3, p_min=True))
    cache = mlx_mtp.make_prompt_cache(model, **options, mtp_kv_bits=8)
    assert text_of(model, PROMPT, 3, prompt_cache=cache, prefill_step_size=5) == expected
    assert cache.quantizing is None


@pytest.mark.parametrize("plan", ["lookup", "sure", pytest.param("heads", marks=pytest.mark.slow)])
def test_plans_are_cut_short_before_quantizing(quantizable, monkeypatch, plan):
    """Down to no draft at all: such a cycle is a plain one, whoever was to draft."""
    model, plain = quantizable
    for start in range(len(PROMPT) + 2, len(PROMPT) + 6):
        options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": start}
        control, stats, expected = Listed([PLANS[plan]]), Stats(), plain(tuple(options.items()))[:16]
        with monkeypatch.context() as patch:
            follow(patch, control)
            assert text_of(model, PROMPT, 3, max_tokens=16, stats=stats, **options) == expected
        assert_adds_up(stats, control)
        assert all(c.plan == Plan() or c.plan.k for c in control.cycles)


def assert_adds_up(stats: Stats, control) -> None:
    """What stats count is what the control was told of."""
    cycles = control.cycles
    assert stats.cycles == len(cycles) == sum(stats.lengths.values())
    assert stats.waits == stats.cycles + sum(c.plan.p_min for c in cycles)
    by = {source: [c for c in cycles if c.plan.source == source] for source in ("heads", "lookup")}
    assert stats.lookups == len(by["lookup"])
    assert stats.lookup_drafted == sum(c.verified for c in by["lookup"])
    assert stats.lookup_accepted == sum(c.accepted for c in by["lookup"])
    for depth in range(len(stats.drafted)):
        assert stats.drafted[depth] == sum(c.verified > depth for c in by["heads"])
        assert stats.accepted[depth] == sum(c.accepted > depth for c in by["heads"])
    # Every token but the first is from a cycle; the last one may have been cut.
    tokens = stats.cycles + sum(stats.accepted) + stats.lookup_accepted
    assert 0 <= tokens - (stats.generation_tokens - 1) <= cycles[-1].accepted


@pytest.mark.parametrize("where", ["before", pytest.param("behind", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["draft", "start"])
def test_interrupted_where_caches_are_quantized(quantizable, monkeypatch, name, where):
    """A cache that goes back to before it was quantized is still to be."""
    model, plain = quantizable
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": len(PROMPT) + 6}
    truth = plain(tuple(options.items()))
    for at in range(2, 8):
        cache, shown, calls = mlx_mtp.make_prompt_cache(model, **options), [], []
        with monkeypatch.context() as patch:
            owner = decode if name == "begin" else cycle
            real = getattr(owner, name)

            def interrupt(*args, real=real, calls=calls, at=at):
                calls.append(1)
                done = real(*args) if where == "behind" or len(calls) != at else None
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


@pytest.mark.parametrize("seed", range(2))
def test_a_window_on_full_attention(subject, monkeypatch, seed):
    s = subject("step3p5")
    expected = text_of(s.model, PROMPT, 0, prompt_lookup=False, max_kv_size=12)
    follow(monkeypatch, Script(seed, max_drafts=3, p_min=True))
    assert text_of(s.model, PROMPT, 3, max_kv_size=12, prefill_step_size=(5, 2048)[seed]) == expected


@pytest.mark.parametrize("name", ["step3p5", "qwen3_5", "mimo_v2_flash"])
def test_turns_that_end_anywhere(subject, monkeypatch, name):
    """By a limit, by the caller, by a stop token: each turn goes on from what was shown, with exact drafts."""
    s, spy, text = subject(name), Spy(monkeypatch), list(PROMPT)
    cache = mlx_mtp.make_prompt_cache(s.model)
    for turn, n in enumerate((1, 9, 4, 11, 2)):
        follow(monkeypatch, Script(turn, max_drafts=s.k, p_min=True))
        new, how = text[len(cache.tokens) :], ("limit", "close", "stop")[turn % 3]
        truth = s.truth(tuple(text), 12)
        stops = {truth[n - 1]} if how == "stop" else ()
        limit = n if how == "limit" else 12
        generation = steps(
            s.model, new, s.k, prompt_cache=cache, max_tokens=limit, stop_tokens=stops, prefill_step_size=3
        )
        shown = []
        for token, _, _ in generation:
            shown.append(token)
            if how == "close" and len(shown) == n:
                generation.close()
        assert shown == truth[: truth.index(truth[n - 1]) + 1 if how == "stop" else n]
        assert cache.tokens == (text + shown)[:-1]
        assert_same_rows(s.model, cache, s.read(tuple(cache.tokens)))
        s.assert_drafts(spy, text + shown, least=0, most=3)
        spy.calls.clear()
        text += [*shown, 3, 1, 2][: len(shown) + turn]


@pytest.mark.parametrize("name", ["step3p5", "qwen3_5"])
def test_interrupted_where_the_first_token_is_submitted(subject, monkeypatch, name):
    """The prompt's last row, which is under way then, has not been lost for the heads."""
    s, shown = subject(name), []
    cache = mlx_mtp.make_prompt_cache(s.model)
    with monkeypatch.context() as patch:
        patch.setattr(mx, "async_eval", lambda *arrays: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(steps(s.model, PROMPT, s.k, prompt_cache=cache))
    assert cache.tokens == PROMPT
    assert cache.primed + cache.behind == len(PROMPT)
    assert_whole(s, monkeypatch, shown, cache, s.truth(tuple(PROMPT)))
