"""If a sequence's sampler or processor raises, that sequence ends and the others do not change."""

import itertools

import mlx.core as mx
import pytest
from sweep import paired

import mlx_mtp
from mlx_mtp.batch import generator
from mlx_mtp.decoding.prefill import read_chunk

PROMPTS = [[1, 2, 3, 0, 2, 4], [2, 2, 1], [3, 0, 1, 2]]


class Broken(Exception):
    """Raised by these tests only."""


def breaking(call: int):
    """Return a function that works as a sampler and as a processor, and raises at one call."""
    calls = itertools.count(1)

    def choose(*given):
        if next(calls) == call:
            raise Broken
        return mx.argmax(given[0], axis=-1) if len(given) == 1 else given[1]

    return choose


def collected(batch, uids) -> tuple[dict, list]:
    """Return the tokens of all sequences, and the uids of those that fail, in order."""
    found, failed = {uid: [] for uid in uids}, []
    while True:
        try:
            responses = batch.next_generated()
        except Broken:
            failed.append(batch.failed)
            continue
        if not responses:
            return found, failed
        for r in responses:
            found[r.uid].append(r.token)


def alone(model, prompt, n) -> list[int]:
    return [token for token, *_ in mlx_mtp.generate_step(prompt, model, max_tokens=n)]


@pytest.mark.parametrize(("call", "kind"), paired([1, 2, 9], ["samplers", "logits_processors"]))
def test_only_that_sequence_fails(tiny_models, kind, call):
    """At its first token, when it joins the others, and later."""
    model, _ = tiny_models(0)
    batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=1, adaptive=False)
    own = [None, breaking(call) if kind == "samplers" else [breaking(call)], None]
    uids = batch.insert(PROMPTS, [12, 12, 12], **{kind: own})
    found, failed = collected(batch, uids)
    assert failed == uids[1:2]
    assert [found[uid] for uid in uids[::2]] == [alone(model, PROMPTS[i], 12) for i in (0, 2)]
    assert found[uids[1]] == alone(model, PROMPTS[1], 12)[: len(found[uids[1]])]
    assert len(found[uids[1]]) < min(call, 12)
    assert batch.prompt_cache_nbytes == 0


@pytest.mark.parametrize(("call", "texts"), paired([1, 2, 5], [1, 2]))
def test_all_active_sequences_fail(tiny_models, texts, call):
    """Then others join. The error of a sequence that is removed is not raised."""
    model, _ = tiny_models(0)
    batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=1, adaptive=False)
    uids = batch.insert(PROMPTS[:texts], samplers=[breaking(call) for _ in range(texts)])
    assert sorted(collected(batch, uids)[1]) == uids
    gone = batch.insert(PROMPTS[:1], samplers=[breaking(1)])
    batch.next()
    batch.remove(gone)
    uids = batch.insert(PROMPTS, [5] * 3)
    found, failed = collected(batch, uids)
    assert not failed
    assert [found[uid] for uid in uids] == [alone(model, prompt, 5) for prompt in PROMPTS]


def test_only_the_sequence_whose_prefill_fails_ends(tiny_models, monkeypatch):
    """While another one decodes, and one more is queued."""
    model, _ = tiny_models(0)

    def broken(model, cache, tokens, **how):
        if tokens[0] == PROMPTS[1][0] and not cache.offset:
            raise Broken
        return read_chunk(model, cache, tokens, **how)

    monkeypatch.setattr(generator, "read_chunk", broken)
    batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=1, adaptive=False, prefill_step_size=2)
    uids = batch.insert(PROMPTS, [12, 12, 12])
    found, failed = collected(batch, uids)
    assert failed == uids[1:2]
    assert [found[uid] for uid in uids] == [alone(model, PROMPTS[0], 12), [], alone(model, PROMPTS[2], 12)]
    assert batch.prompt_cache_nbytes == 0
