"""Let a text's own sampler or processor raise: that text ends, and the others are what they are alone."""

import itertools

import mlx.core as mx
import pytest

import mlx_mtp
from mlx_mtp.batch import generator
from mlx_mtp.decoding.prefill import read_chunk

PROMPTS = [[1, 2, 3, 0, 2, 4], [2, 2, 1], [3, 0, 1, 2]]


class Broken(Exception):
    """What only these tests raise."""


def breaking(call: int):
    """Make what serves as a sampler and as a processor, until one call of it."""
    calls = itertools.count(1)

    def choose(*given):
        if next(calls) == call:
            raise Broken
        return mx.argmax(given[0], axis=-1) if len(given) == 1 else given[1]

    return choose


def told(batch, uids) -> tuple[dict, list]:
    """Collect the tokens of all texts, and the numbers of those that fail, in order."""
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


@pytest.mark.parametrize("call", [1, 2, 9])
@pytest.mark.parametrize("kind", ["samplers", "logits_processors"])
def test_it_alone_fails(tiny_models, kind, call):
    """At its first token, when it comes to the others, and in their middle."""
    model, _ = tiny_models(0)
    batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=1, adaptive=False)
    own = [None, breaking(call) if kind == "samplers" else [breaking(call)], None]
    uids = batch.insert(PROMPTS, [12, 12, 12], **{kind: own})
    found, failed = told(batch, uids)
    assert failed == uids[1:2]
    assert [found[uid] for uid in uids[::2]] == [alone(model, PROMPTS[i], 12) for i in (0, 2)]
    assert found[uids[1]] == alone(model, PROMPTS[1], 12)[: len(found[uids[1]])]
    assert len(found[uids[1]]) < min(call, 12)
    assert batch.prompt_cache_nbytes == 0


@pytest.mark.parametrize("texts", [1, 2])
@pytest.mark.parametrize("call", [1, 2, 5])
def test_all_that_are_there_fail(tiny_models, texts, call):
    """Then others come, and what was removed before it was told of is not told of."""
    model, _ = tiny_models(0)
    batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=1, adaptive=False)
    uids = batch.insert(PROMPTS[:texts], samplers=[breaking(call) for _ in range(texts)])
    assert sorted(told(batch, uids)[1]) == uids
    gone = batch.insert(PROMPTS[:1], samplers=[breaking(1)])
    batch.next()
    batch.remove(gone)
    uids = batch.insert(PROMPTS, [5] * 3)
    found, failed = told(batch, uids)
    assert not failed
    assert [found[uid] for uid in uids] == [alone(model, prompt, 5) for prompt in PROMPTS]


def test_a_text_whose_prompt_cannot_be_read_fails_alone(tiny_models, monkeypatch):
    """While another one decodes, and one more waits."""
    model, _ = tiny_models(0)

    def broken(model, cache, chunk, **how):
        if chunk[0] == PROMPTS[1][0] and not cache.offset:
            raise Broken
        return read_chunk(model, cache, chunk, **how)

    monkeypatch.setattr(generator, "read_chunk", broken)
    batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=1, adaptive=False, prefill_step_size=2)
    uids = batch.insert(PROMPTS, [12, 12, 12])
    found, failed = told(batch, uids)
    assert failed == uids[1:2]
    assert [found[uid] for uid in uids] == [alone(model, PROMPTS[0], 12), [], alone(model, PROMPTS[2], 12)]
    assert batch.prompt_cache_nbytes == 0
