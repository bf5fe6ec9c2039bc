"""Replayed cycles equal built ones in tokens, accepted drafts and caches; few are recorded, and hold no caches."""

import copy
import itertools
import random
import threading
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import drafters
import families
import mlx.core as mx
import pytest
from compile_mode import ENABLED, set_mode
from oracle import Oracle
from plans import Script
from subjects import assert_same_rows
from sweep import sampled, sweep

import mlx_mtp
from mlx_mtp.cache import growing, kinds
from mlx_mtp.decoding import alone, policy
from mlx_mtp.decoding import replay as replay_module
from mlx_mtp.decoding.replay import Compiled, Recorder
from mlx_mtp.decoding.run import Run
from mlx_mtp.decoding.sampling import Picker
from mlx_mtp.decoding.stats import Stats
from mlx_mtp.tuning import replay_choice
from mlx_mtp.tuning.plan import Plan
from mlx_mtp.tuning.replay_choice import CompileChoice

PROMPT = [1, 2, 3, 0, 2, 2, 1, 3, 0, 1, 2]


@pytest.fixture(autouse=True)
def _own(recorded_at_once, own_cache):
    """Separate costs, and recording at the first occurrence."""


def run(model, n, k, *, replay=True, prompt=PROMPT, **options):
    """Return the tokens, and stats.

    stats.text: the tokens. stats.runs: each cycle's drafts, which show the rows that the heads read.
    """
    stats, real = mlx_mtp.Stats(), Run.read
    stats.runs = []

    def read(run):
        found = real(run)
        stats.runs.append((None if run.drafts is None else run.drafts.tolist(), found))
        return found

    options = {"adaptive": False, "compile_cycles": replay, **options}
    with mock.patch.object(Run, "read", read):
        steps = mlx_mtp.generate_step(prompt, model, max_tokens=n, num_draft_tokens=k, stats=stats, **options)
        stats.text = tuple(token for token, _, _ in steps)
        return [*stats.text], stats


def check(model, n, k, *, share=0.8, **options):
    """Compare replayed with built cycles; return the number of replayed ones."""
    expected, built = run(model, n, k, replay=False, **options)
    tokens, stats = run(model, n, k, **options)
    assert tokens == expected
    assert stats.runs == built.runs
    assert built.compiled_cycles == built.compiled_shapes == 0
    assert share * stats.cycles < stats.compiled_cycles <= stats.cycles
    return stats


def of_family(name, path):
    if name == "eagle3":
        target, _ = families.headless(path / "target", {"model_type": "llama", **drafters.GQA})
        drafter = drafters.save(path / "drafter", drafters.CONFIG, drafters.GQA["hidden_size"])
        return mlx_mtp.load_model(target, draft_model=drafter)
    return mlx_mtp.load_model(families.build(name, path)[0])


def test_text_and_drafts(tiny_models):
    """Prompts below and above the window of 8, which the new tokens wrap many times."""
    model, _ = tiny_models(0)
    for k, length in sampled([(0, 1), (3, 11)], ((0, 1), (1, 11), (2, 2), (3, 11))):
        check(model, 20, k, share=0.6, prompt=PROMPT[:length])


def test_every_accepted_part(tiny_models, monkeypatch):
    model = copy.copy(tiny_models(0)[0])
    model.runtime = replace(model.runtime, recorder=Recorder())  # it records the drafts of this test
    truth = PROMPT + run(model, 36, 0, replay=False)[0]
    rng = random.Random(0)
    wrong = {i for i in range(len(truth)) if rng.random() < 0.25}
    monkeypatch.setattr(model, "drafter", Oracle(model, truth, wrong))
    stats = check(model, 36, 3)
    assert all(0 < stats.accepted[i] < stats.drafted[i] for i in range(3))


FEWER = ("deepseek_v3", "nemotron_h", "glm_moe_dsa_shared", "mimo_v2_flash")
SLOW = [pytest.param(name, marks=sweep) for name in FEWER]


@pytest.mark.parametrize("name", ["tiny", "qwen3_5", "eagle3", *SLOW])
def test_any_plan_after_any_other(tiny_models, monkeypatch, tmp_path, name):
    """Heads pause and resume, recurrent tapes change their lengths, and lookups occur in between."""
    model = tiny_models(0)[0] if name == "tiny" else of_family(name, tmp_path)
    k = min(3, model.max_draft_tokens)
    done, traced = [], []
    real = replay_module.step
    monkeypatch.setattr(replay_module, "step", lambda *args: traced.append(args[0].plan) or real(*args))
    for replay in (False, True):
        script = Script(5, max_drafts=k)
        monkeypatch.setattr(alone, "control_for", lambda *_, s=script, **__: s)
        tokens, stats = run(model, 24, k, replay=replay, prompt_lookup=True)
        done.append((tokens, stats.runs, [(c.plan, c.verified, c.accepted, c.prefilled) for c in script.cycles]))
    assert done[0] == done[1]
    assert stats.compiled_cycles > 0.9 * stats.cycles
    assert len(traced) == stats.compiled_shapes  # MLX records nothing by itself
    assert len(model.runtime.recorder.cycles) <= replay_module.KEPT


@pytest.mark.parametrize("name", sampled(["deepseek_v3"], ["qwen3_5", "deepseek_v3", "eagle3"]))
def test_families(tmp_path, name):
    model = of_family(name, tmp_path)
    for k in sampled((3,), (0, 3)):
        check(model, 18, k)


@sweep
@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_all_families(tmp_path, name):
    model = of_family(name, tmp_path)
    for k in range(4):
        check(model, 60, k)
        check(model, 60, k, temp=1.0, seed=1)


def test_recycled_heads_and_rings_at_their_limit(tmp_path):
    model = of_family("mimo", tmp_path)
    check(model, 16, model.max_draft_tokens, share=0.7)


def test_quantized_caches(tiny_models):
    """Caches are quantized between replayed cycles; earlier records are of another kind."""
    model, _ = tiny_models(0, head_dim=32)
    options = {"kv_bits": 8, "mtp_kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": 19}
    for k in sampled((3,), (0, 3)):
        check(model, 20, k, **options)


DRAWS = [
    {},
    {"draft_sampling": "greedy"},
    {"top_p": 0.9, "top_k": 4, "min_p": 0.01, "logprobs": True},
    {"xtc_probability": 0.5, "xtc_threshold": 0.1, "draft_sampling": "greedy"},
]


@pytest.mark.parametrize("options", sampled(DRAWS[1:2], DRAWS))
def test_draws(cheap, options):
    """Draws depend on the seed and temperature of the generation, not on those that were recorded."""
    texts = set()
    for seed, temp in ((1, 1.5), (2, 1.5), (1, 4.0)):
        stats = check(cheap, 10, 2, share=0.5, temp=temp, seed=seed, **options)
        texts.add(stats.text)
    assert len(texts) == 3
    assert len({tuple(run(cheap, 10, 2, temp=1.5, **options)[0]) for _ in range(2)}) == 2


@pytest.fixture(scope="module")
def cheap(tmp_path_factory):
    return of_family("glm4_moe_untied", tmp_path_factory.mktemp("cheap"))


def test_logprobs(cheap):
    both = [
        list(
            mlx_mtp.generate_step(PROMPT, cheap, max_tokens=16, adaptive=False, logprobs=True, compile_cycles=replay)
        )
        for replay in (False, True)
    ]
    for (a, p, drafted), (b, q, also) in zip(*both, strict=True):
        assert (a, drafted) == (b, also)
        assert mx.allclose(p, q, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "k"), sampled([("tiny", 3), ("qwen3_5", 3)], [("tiny", 3), ("qwen3_5", 0), ("qwen3_5", 3)])
)
def test_stop_anywhere_then_continue(tiny_models, tmp_path, name, k):
    model = tiny_models(2)[0] if name == "tiny" else of_family(name, tmp_path)
    truth, _ = run(model, 15, 0, replay=False)
    for n in sampled((7,) if name == "tiny" else (1,), (1, 4, 7)):
        cache, built = (mlx_mtp.make_prompt_cache(model) for _ in range(2))
        steps = mlx_mtp.generate_step(
            PROMPT, model, max_tokens=15, num_draft_tokens=k, prompt_cache=cache, adaptive=False, compile_cycles=True
        )
        first = [next(steps)[0] for _ in range(n)]
        steps.close()
        assert first == truth[:n]
        assert cache.tokens == PROMPT + first[:-1]
        run(model, n, k, replay=False, prompt_cache=built)
        assert_same_rows(model, cache, built, rtol=1e-5, atol=1e-5)
        mlx_mtp.save_prompt_cache(tmp_path / "cache.safetensors", cache)
        for kept in (cache, mlx_mtp.load_prompt_cache(tmp_path / "cache.safetensors", model)):
            assert run(model, 15 - n, 3 - k, prompt=first[-1:], prompt_cache=kept)[0] == truth[n:]


@pytest.mark.parametrize("name", ["qwen3_5", SLOW[2]])
def test_built_and_replayed_in_turns(monkeypatch, tmp_path, name):
    model = of_family(name, tmp_path)

    class Turns(CompileChoice):
        on = property(lambda self: rng.random() < 0.5, lambda self, value: None)

    for k in sampled((3,), (0, 3)):
        rng = random.Random(k)
        choice = Turns(None)
        monkeypatch.setattr(alone, "compiled_for", lambda *_, c=choice: Compiled(Recorder(), c))
        stats = check_against_built(model, 24, k)
        assert 0.2 * stats.cycles < stats.compiled_cycles < 0.8 * stats.cycles


def check_against_built(model, n, k):
    tokens, stats = run(model, n, k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alone, "compiled_for", lambda *_: None)
        expected, built = run(model, n, k)
    assert (tokens, stats.runs) == (expected, built.runs)
    return stats


@pytest.mark.parametrize("k", sampled([2], [0, 2]))
def test_buffers_grow_and_few_kinds_are_recorded(cheap, monkeypatch, k):
    """One kind per buffer block and draft length, and that of the first cycle, after a run of one row."""
    monkeypatch.setattr(growing, "STEP", 16)
    monkeypatch.setattr(kinds.LinearKVCache, "reserve", lambda self, rows: None)
    cheap.runtime.recorder = Recorder()
    stats = check(cheap, 36, k)
    assert 3 <= stats.compiled_shapes == len(cheap.runtime.recorder.cycles) <= 3 + 1
    assert stats.compiled_cycles == stats.cycles
    monkeypatch.setattr(replay_module, "KEPT", 2)
    run(cheap, 36, 1)
    assert len(cheap.runtime.recorder.cycles) == 2


def test_what_is_recorded_holds_few_sources(cheap, monkeypatch):
    """Records together hold at most the allowed bytes of kernel sources."""
    monkeypatch.setattr(growing, "STEP", 16)
    monkeypatch.setattr(kinds.LinearKVCache, "reserve", lambda self, rows: None)
    monkeypatch.setattr(replay_module, "source_bytes", partial(next, itertools.count(0, 11)))
    cheap.runtime.recorder = Recorder()
    for held, most, n in sampled([(30, 2, 40), (5, 1, 24)], [(50, 4, 56), (30, 2, 40), (5, 1, 24)]):
        monkeypatch.setattr(replay_module, "HELD", held)
        stats = check(cheap, n, 1)
        assert stats.compiled_shapes >= most
        assert [record.held for record in cheap.runtime.recorder.cycles.values()] == [[11]] * most


@pytest.mark.parametrize("window", sampled([8], [8, 64]))
def test_another_conversation_replays_what_is_recorded(tiny_models, window):
    """With another prompt, length and seed, and heads that start at other positions."""
    model, _ = tiny_models(0, vocab_size=6, sliding_window=window)
    for k in sampled((3,), (0, 3)):
        run(model, 12, k, prompt=PROMPT * 9, temp=1.0, seed=1)
        stats = check(model, 12, k, prompt=[3, 3, 1, 5, 0, 0, 1, 2] * 14, temp=1.0, seed=2)
        assert stats.compiled_shapes == 0
        assert stats.compiled_cycles == stats.cycles


def test_a_kind_that_is_rare_is_not_recorded(cheap, monkeypatch):
    monkeypatch.setattr(replay_module, "OFTEN", 3)
    cheap.runtime.recorder = Recorder()
    assert run(cheap, 2, 1)[1].compiled_cycles == 0
    stats = check(cheap, 24, 1, share=0.7)
    assert (stats.compiled_shapes, stats.cycles - stats.compiled_cycles) == (1, 2)


def test_cycles_built_without_a_record_are_not_timed(cheap, monkeypatch):
    """They take longer than replayed cycles of their kind."""
    monkeypatch.setattr(replay_module, "OFTEN", 2)
    replay, stats = replay_module.Compiled(Recorder(), CompileChoice(True)), Stats()
    kind = replay_module.StepKey(Plan(), False, 1, 256, None, (), ())
    for new, recorded in ((0, False), (1, True)):
        assert (replay.recall(cheap, kind, len, 100, stats) is not None) is recorded
        assert stats.compiled_shapes == new
        assert [replay.observe(Plan(), 1, recorded, 0.1) for _ in range(3)] == [None, None, 0.1]
    assert replay.recall(cheap, kind, len, 100, stats)
    assert replay.observe(Plan(), 1, True, 0.1) == 0.1


def test_caches_are_released(tiny_models):
    """Records hold no cache, and caches are written in place, also when they grow."""
    model, _ = tiny_models(0, head_dim=64, vocab_size=8)
    for k in (0, 2):
        run(model, 8, k)
        mx.clear_cache()
        before = mx.get_active_memory()
        cache = mlx_mtp.make_prompt_cache(model)
        cache.reserve(40_000)
        for c in cache.layers:
            c.reserve = lambda rows: None
        list(mlx_mtp.generate_step(PROMPT, model, prompt_cache=cache, max_tokens=0))
        held = mx.get_active_memory() - before
        assert cache.layers[0].nbytes > 0.3 * held > 10e6
        steps = mlx_mtp.generate_step(
            [1], model, prompt_cache=cache, max_tokens=12, num_draft_tokens=k, adaptive=False, compile_cycles=True
        )
        for i, _ in enumerate(steps):
            if i == 4:
                mx.reset_peak_memory()
        assert mx.get_peak_memory() - before < 1.3 * held
        del steps
        cache = None
        assert mx.get_active_memory() - before < 0.1 * held


def test_records_of_a_changed_model_are_dropped(tmp_path):
    model = of_family("glm4_moe_untied", tmp_path)
    old = run(model, 12, 1)[1].compiled_shapes
    model.lm_head.weight = -model.lm_head.weight
    assert check(model, 12, 1, share=0.6).compiled_shapes == old > 0
    assert run(model, 12, 1)[1].compiled_shapes == 0
    for rows in ({1}, {2}):
        model.layers[0].mlp.site = SimpleNamespace(rows=frozenset(rows))
        assert run(model, 12, 1)[1].compiled_shapes == old


def test_in_another_thread(cheap):
    found = []
    expected, _ = run(cheap, 20, 1)
    thread = threading.Thread(target=lambda: found.append(run(cheap, 20, 1)))
    thread.start()
    thread.join()
    ((tokens, stats),) = found
    assert tokens == expected
    assert stats.compiled_shapes > 0
    check(cheap, 20, 1)


def test_a_model_is_freed_with_what_is_recorded(tmp_path):
    model = of_family("glm4_moe_untied", tmp_path)
    run(model, 20, 1)
    twin = copy.deepcopy(model)
    assert run(twin, 20, 1)[0] == run(model, 20, 1)[0]
    alive, recorder = weakref.ref(model), weakref.ref(model.runtime.recorder)
    assert recorder().cycles
    del model
    assert alive() is None
    assert recorder() is None


def test_what_is_built(cheap):
    """Cycles with a caller's code or p_min, and the default on a CPU."""
    own = {"sampler": lambda logprobs: mx.argmax(logprobs, axis=-1)}
    processor = {"logits_processors": [lambda tokens, logits: logits]}
    expected = run(cheap, 12, 0, replay=False)[0]
    for options in (own, processor, {"draft_p_min": 0.1}, {"compile_cycles": None}, {"compile_cycles": False}):
        tokens, stats = run(cheap, 12, 2, **options)
        assert stats.compiled_cycles == stats.compiled_shapes == 0
        assert tokens == expected
    layout = mlx_mtp.make_prompt_cache(cheap), Picker()
    assert policy.compiled_for(cheap, *layout, None) is None
    assert policy.compiled_for(cheap, *layout, True) is not None


def test_the_verdict_is_remembered(cheap, monkeypatch):
    """A generation on a GPU decides, and later ones, also in other processes, use the verdict."""
    model = cheap
    monkeypatch.setattr(policy, "mx", SimpleNamespace(cpu="cpu", default_device=lambda: "gpu"))
    monkeypatch.setattr(replay_choice, "BLOCK", 4)  # a trial then takes half as many cycles
    observe = CompileChoice.observe
    times = {True: 1.0, False: 1.5}
    monkeypatch.setattr(CompileChoice, "observe", lambda self, like, on, s: observe(self, like, on, s and times[on]))
    options = {"replay": None, "adaptive": True, "prompt_lookup": False}
    for verdict in (True, False):
        times[True] = 1.0 if verdict else 2.0
        model.runtime.recorder = Recorder()
        tokens, stats = run(model, 80, 1, **options)
        assert stats.compiled_cycles > 0
        assert model.runtime.recorder.verdict is verdict
        assert bool(model.runtime.recorder.cycles) is verdict
        model.runtime.recorder = None
        again, stats = run(model, 20, 1, **options)
        assert bool(stats.compiled_cycles) is verdict
        assert tokens[:20] == again == run(model, 20, 0, replay=False)[0]
        assert policy.learned(model).remembered[False].recall() is not None


@sweep  # on a CPU: a C++ compiler makes twenty kernels
def test_with_fused_kernels(tmp_path):
    set_mode(ENABLED)
    check(of_family("mimo", tmp_path), 12, 1)
