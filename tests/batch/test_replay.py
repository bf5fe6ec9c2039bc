"""Replayed cycles of several sequences equal built ones bit for bit; few are recorded while sequences come and go."""

import copy
import random
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import mlx.core as mx
import pytest
from compile_mode import ENABLED, NO_FUSE, set_mode
from subjects import subjects
from sweep import sampled, sweep

import mlx_mtp
from mlx_mtp.cache.pool import Pool
from mlx_mtp.decoding import driver, policy, replay
from mlx_mtp.decoding.pool_rows import slots_for
from mlx_mtp.decoding.replay import Recorder
from mlx_mtp.decoding.sampling import Sampling
from mlx_mtp.tuning import replay_choice
from mlx_mtp.tuning.replay_choice import CompileChoice

NAMES = ["step3p5", "qwen3_5", "deepseek_v3", "glm_moe_dsa_shared", "nemotron_h", "mimo_v2_flash", "eagle"]
PROMPTS = [[1, 2, 3, 0, 2, 4], [2, 2, 1], [3, 0, 1, 2, 2, 1, 0], [1, 1]]


@pytest.fixture(scope="module")
def subject(tiny_models, tmp_path_factory):
    return subjects(tiny_models, tmp_path_factory)


def fresh(model):
    """Return the model without records."""
    twin = copy.copy(model)
    twin.runtime = replace(twin.runtime, recorder=Recorder())
    return twin


def session(model, limits, comes, **options):
    """Run sequences of PROMPTS that join at cycles; return their (token, from_draft), last caches and the stats."""
    stats, found, caches, cycle = mlx_mtp.Stats(), {}, {}, 0
    batch = mlx_mtp.BatchGenerator(model, stats=stats, **{"adaptive": False, **options})
    while cycle <= max(comes) or len(caches) < len(limits):
        for i, come in enumerate(comes):
            if come == cycle:
                batch.insert([PROMPTS[i % len(PROMPTS)]], [limits[i]], seeds=[i])
        for r in batch.next()[1]:
            found.setdefault(r.uid, []).append((r.token, r.from_draft))
            if r.finish_reason:
                caches[r.uid] = r.prompt_cache
        cycle += 1
    return found, caches, stats


@pytest.mark.parametrize(
    ("name", "k", "temp"),
    sampled([("step3p5", 3, 1.0)], [(n, k, t) for n in NAMES for k in (0, 1, 3) for t in (0, 1)]),
)
def test_replayed_as_built(subject, name, k, temp, recorded_at_once):
    """Tokens, accepted drafts, and every bit of the returned caches."""
    model, schedule = fresh(subject(name).model), ([16, 6, 14, 14], [0, 0, 3, 6])
    built, caches, none = session(model, *schedule, num_draft_tokens=k, temp=temp)
    replayed, ours, stats = session(model, *schedule, num_draft_tokens=k, temp=temp, compile_cycles=True)
    assert replayed == built
    assert stats.cycles == none.cycles
    assert 0.8 * stats.cycles < stats.compiled_cycles <= stats.cycles
    assert none.compiled_cycles == 0 < stats.compiled_shapes == len(model.runtime.recorder.cycles)
    for uid, cache in caches.items():
        for a, b in zip(cache.arrays, ours[uid].arrays, strict=True):
            assert mx.array_equal(a, b)


FUSED = ["deepseek_v32", "glm_moe_dsa_shared"]


class Recorded(Exception):
    pass


def record_fused(step, *arrays, **more):
    """Record a step where MLX fuses operations, without an evaluation, for which a CPU needs a C++ compiler."""
    set_mode(ENABLED)
    try:
        mx.compile(step)(*arrays, **more)
    finally:
        set_mode(NO_FUSE)
    raise Recorded


@pytest.mark.parametrize("name", sampled(FUSED[:1], [*FUSED, *NAMES]))
def test_pools_can_be_recorded_where_operations_are_fused(subject, monkeypatch, name, recorded_at_once):
    """As on a GPU."""
    monkeypatch.setattr(replay.Record, "of", lambda step: replay.Record(partial(record_fused, step), [0]))
    model = fresh(subject(name).model)
    for k in (0, min(1, model.max_draft_tokens)):
        with pytest.raises(Recorded):
            session(model, [6, 6], [0, 0], num_draft_tokens=k, compile_cycles=True)


def test_slots_come_in_few_numbers():
    found = [slots_for(texts) for texts in range(1, 33)]
    assert sorted({*found}) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    assert all(texts <= slots < 1.5 * texts for texts, slots in enumerate(found, 1))


def test_what_is_built(subject, recorded_at_once):
    """Cycles of sequences with different sampling, and the default on a CPU, are built."""
    model = fresh(subject("step3p5").model)
    own = {"sampler": lambda logprobs: mx.argmax(logprobs, axis=-1)}
    assert session(model, [6, 6], [0, 0], compile_cycles=True, **own)[2].compiled_cycles == 0
    assert session(model, [6, 6], [0, 0], compile_cycles=True, logprobs=True)[2].compiled_cycles > 0
    for asked in (None, False):
        assert session(model, [6, 6], [0, 0], compile_cycles=asked)[2].compiled_cycles == 0
    batch = mlx_mtp.BatchGenerator(model, compile_cycles=True, stats=(stats := mlx_mtp.Stats()))
    batch.insert(PROMPTS[:2], [6, 6], samplers=[Sampling(), Sampling(temp=1.0)])
    while batch.next_generated():
        pass
    assert stats.compiled_cycles == 0 < stats.cycles


def test_the_verdict_of_a_pool_is_remembered_once(subject, monkeypatch, recorded_at_once):
    """As soon as the trial has ended: a batch may last as long as a server."""
    model, calls = fresh(subject("step3p5").model), []
    monkeypatch.setattr(policy, "mx", SimpleNamespace(cpu="cpu", default_device=lambda: "gpu"))
    monkeypatch.setattr(replay_choice, "BLOCK", 2)
    monkeypatch.setattr(replay_choice, "MIXED", 0)
    monkeypatch.setattr(driver, "remember", lambda *given: calls.append(given))
    session(model, [40, 40], [0, 0])
    assert model.runtime.recorder.verdict is not None
    assert len(calls) == 1


@sweep
def test_a_trial_finds_out_whether_replays_are_quicker(subject, monkeypatch):
    """The default on a GPU: blocks of cycles are replayed and built in turns, with the same tokens."""
    model = fresh(subject("step3p5").model)
    monkeypatch.setattr(policy, "mx", SimpleNamespace(cpu="cpu", default_device=lambda: "gpu"))
    observe, expected = CompileChoice.observe, session(model, [150, 150], [0, 0], num_draft_tokens=1)[0]
    for verdict in (True, False):
        times = {True: 1.0, False: 1.5 if verdict else 0.5}
        monkeypatch.setattr(
            CompileChoice, "observe", lambda c, like, on, s, t=times: observe(c, like, on, s and t[on])
        )
        model.runtime.recorder = Recorder()
        found, _, stats = session(model, [150, 150], [0, 0], num_draft_tokens=1)
        assert found == expected
        assert 0 < stats.compiled_cycles < stats.cycles
        assert model.runtime.recorder.verdict is verdict
        assert bool(model.runtime.recorder.cycles) is verdict


@sweep
@pytest.mark.parametrize(("name", "k"), [("step3p5", 3), ("qwen3_5", 1), ("qwen3_5", 0)])
def test_kinds_of_a_session_of_four_agents(subject, monkeypatch, name, k):
    """Each sends four requests, as soon as its answer of up to 500 tokens has arrived, after all earlier turns.

    One kind for every 256 positions up to 2,304, and one or two where the last ones are fewer than four.
    """
    model, rng = fresh(subject(name).model), random.Random(name)
    frames, real, stats = [], replay.step, mlx_mtp.Stats()
    monkeypatch.setattr(replay, "step", lambda *args: frames.append(args[0]) or real(*args))
    options = {"num_draft_tokens": k, "adaptive": False, "compile_cycles": True, "stats": stats}
    batch, turns, conversations = mlx_mtp.BatchGenerator(model, **options), {}, {}

    def ask(agent, cache=None):
        prompt = [rng.randrange(model.vocab_size) for _ in range(40 if cache else 300)]
        (uid,) = batch.insert([prompt], [rng.randint(250, 500)], caches=[cache])
        turns[uid] = agent

    for agent in range(4):
        ask(agent)
    while responses := batch.next_generated():
        for r in responses:
            agent = turns[r.uid]
            conversations[agent] = conversations.get(agent, 0) + bool(r.finish_reason)
            if r.finish_reason and conversations[agent] < 4:
                ask(agent, r.prompt_cache)
    traced = [frame for frame in frames if isinstance(frame.cache, Pool)]
    alone = [frame for frame in frames if not isinstance(frame.cache, Pool)]
    assert len(traced) <= 10
    assert stats.compiled_shapes == len(traced) + len(alone)
    assert len(alone) <= 5  # of the one that is the last
    assert stats.compiled_cycles > 0.98 * stats.cycles
    assert len(model.runtime.recorder.cycles) <= 2 * replay.KEPT
