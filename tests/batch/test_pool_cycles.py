"""What the cycles of a pool cost, and what their control and statistics are given."""

import itertools

import grammars
import pytest

import mlx_mtp
from mlx_mtp import grammar
from mlx_mtp.batch.drivers import is_lone
from mlx_mtp.cache.pool import Pool
from mlx_mtp.decoding import build, driver, pooled
from mlx_mtp.decoding.control import Controls
from mlx_mtp.decoding.run import Run
from mlx_mtp.kernels import KernelRefused
from mlx_mtp.tuning.controller import Controller
from mlx_mtp.tuning.plan import PLAIN, Fixed, Plan

PROMPTS = [[1, 2, 3, 0, 2, 4], [2, 2, 1], [3, 0, 1, 2]]


@pytest.fixture
def model(tiny_models):
    return tiny_models(0)[0]


def batch_of(model, limits, options=None, **own):
    batch = mlx_mtp.BatchGenerator(model, **{"adaptive": False, "num_draft_tokens": 0, **(options or {})})
    batch.insert(PROMPTS[: len(limits)], limits, **own)
    return batch


def drained(batch) -> list[list[int]]:
    found: dict = {}
    while responses := batch.next_generated():
        for r in responses:
            found.setdefault(r.uid, []).append(r.token)
    return [found[uid] for uid in sorted(found)]


def counted(monkeypatch, owner, name: str) -> list:
    """Record the calls of a function."""
    calls, real = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **how: calls.append(args) or real(*args, **how))
    return calls


@pytest.mark.parametrize("k", [0, 2])
def test_rows_move_only_when_sequences_join_or_end(model, monkeypatch, k):
    moves = counted(monkeypatch, Pool, "regroup")
    drained(batch_of(model, [20, 8, 4], {"num_draft_tokens": k}))
    assert len(moves) == 3


def test_the_next_cycle_runs_when_tokens_are_returned(model, monkeypatch):
    """Also where it is built late."""
    starts, reads = counted(monkeypatch, build, "start"), counted(monkeypatch, Run, "read")
    batch = batch_of(model, [20, 20], logits_processors=[[lambda tokens, logits: logits]] * 2)
    batch.next()
    del starts[:], reads[:]
    for n in range(2, 9):
        assert batch.next()[1]
        assert (len(starts), len(reads)) == (n, n - 1)


def test_bytes_of_the_caches(model, monkeypatch):
    """Of a lone sequence, and of a pool, which has no more slots than sequences."""
    batch = batch_of(model, [20])
    (first,) = batch.next()[1]
    batch.next()
    cache = batch.extract_cache([first.uid])[first.uid][0]
    assert batch.prompt_cache_nbytes == cache.nbytes
    moves, batch = counted(monkeypatch, Pool, "regroup"), batch_of(model, [20, 20])
    batch.next()
    batch.next()
    ((pool, *_),) = moves
    assert {part.shape[0] for c in pool.layers for part in c.parts} == {2}
    assert batch.prompt_cache_nbytes == pool.nbytes > 0


@pytest.mark.parametrize("pattern", [None, "(a|b)+"])
def test_cycles_with_a_grammar_have_a_control_of_their_own(model, monkeypatch, pattern):
    real, found = Controls.control, []

    def control(self, sequences, k, max_lookup=0, masked=False):
        found.append((sequences, k, max_lookup > 0, masked))
        return real(self, sequences, k, max_lookup, masked)

    monkeypatch.setattr(Controls, "control", control)
    made = pattern and grammar.regex(pattern, tokenizer=grammars.letters())
    options = {"num_draft_tokens": 2, "prompt_lookup": False}
    drained(batch_of(model, [8, 8], options, num_draft_tokens=[2, 1], grammars=[None, made]))
    assert found[0] == (2, 2, False, pattern is not None)


def test_only_sequences_that_may_draft_report_a_pause(model, monkeypatch):
    def plan(control, matched=0, pending=0):
        control.paused = "a reason"
        return PLAIN

    monkeypatch.setattr(Controller, "plan", plan)
    stats = [mlx_mtp.Stats() for _ in PROMPTS]
    made = grammar.regex("(a|b)+", tokenizer=grammars.letters())
    own = {"num_draft_tokens": [1, 0, 0], "grammars": [None, None, made], "stats": stats}
    options = {"adaptive": True, "num_draft_tokens": 1, "prompt_lookup": False}
    batch = mlx_mtp.BatchGenerator(model, **options)
    batch.insert(PROMPTS, [6] * 3, **own)
    drained(batch)
    assert [each.paused for each in stats] == ["a reason", "", ""]


def test_a_refused_kernel_costs_no_prefill(model, monkeypatch):
    """Unless the drafts of that cycle were evaluated; those of an earlier one do not matter."""
    expected = drained(batch_of(model, [20, 20]))
    turns, real, refused = itertools.count(), driver.submit, []

    def submit(seating, last, new):
        if not new.plan.p_min and isinstance(seating, pooled.Pooled) and len(refused) < 4:
            refused.append(new)
            if len(refused) % 2:
                raise KernelRefused([], voted=True)
        real(seating, last, new)

    monkeypatch.setattr(Fixed, "plan", lambda *_, **__: Plan(k=2, p_min=next(turns) % 2 == 0))
    monkeypatch.setattr(driver, "submit", submit)
    monkeypatch.setattr("mlx_mtp.tuning.kernel_fallback.Fallback.take", lambda *_: None)
    again = counted(monkeypatch, pooled, "prefill_again")
    assert drained(batch_of(model, [20, 20], {"num_draft_tokens": 2, "draft_p_min": 0.3})) == expected
    assert len(refused) == 4
    assert not again


@pytest.mark.parametrize("limit", [-1, 0, 1, 2, 3, 9])
def test_a_sequence_that_will_quantize_its_caches_decodes_alone(tiny_models, limit):
    """Positions offset to offset + limit - 1 are read in its cycles; the caches are quantized before position 8."""
    model, _ = tiny_models(0, head_dim=32)
    for offset in range(5, 10):
        cache = mlx_mtp.make_prompt_cache(model, kv_bits=8, kv_group_size=32, quantized_kv_start=8)
        cache.tokens = [1] * offset
        sequence = type("Asked", (), {"cache": cache, "remaining": limit})
        read = range(offset, 100 if limit < 0 else offset + limit)
        assert is_lone(sequence) == (8 in read), offset
