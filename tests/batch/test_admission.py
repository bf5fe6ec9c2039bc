"""Queued sequences start when active ones leave enough memory, and have the tokens that they have alone."""

import types

import pytest

import mlx_mtp
from mlx_mtp.batch import admission
from mlx_mtp.decoding.memory_needs import kv_bytes

PROMPT = [1, 2, 3, 0, 2]


@pytest.mark.parametrize(("room", "ignore", "most"), [(2.1, False, 2), (0, True, 4)])
def test_newcomers_wait_until_they_fit(tiny_models, monkeypatch, machine, room, ignore, most):
    """The memory is enough for `room` sequences of the longest one's size."""
    model, _ = tiny_models(0)
    monkeypatch.setattr(admission, "UNCHECKED", 0)
    each = sum(kv_bytes(model, mlx_mtp.make_prompt_cache(model), len(PROMPT) + 9))
    machine(room * each)
    batch = mlx_mtp.BatchGenerator(model, check_memory=not ignore, num_draft_tokens=2, adaptive=False)
    uids = batch.insert([PROMPT] * 4, [9, 5, 7, 2])
    texts, active, at_once = {uid: [] for uid in uids}, set(), 0
    while responses := batch.next_generated():
        for r in responses:
            texts[r.uid].append(r.token)
            active = active - {r.uid} if r.finish_reason else active | {r.uid}
            at_once = max(at_once, len(active))
    assert at_once == most
    alone = [token for token, *_ in mlx_mtp.generate_step(PROMPT, model, max_tokens=9)]
    assert list(texts.values()) == [alone[:n] for n in (9, 5, 7, 2)]


def test_replayed_cycles_round_the_number_of_slots(tiny_models, monkeypatch, machine):
    """A fifth sequence needs two slots more; there is memory for one."""
    model, _ = tiny_models(0)
    monkeypatch.setattr(admission, "UNCHECKED", 0)
    sequence = types.SimpleNamespace(cache=mlx_mtp.make_prompt_cache(model), longest=20)
    each = sum(kv_bytes(model, sequence.cache, 20))
    machine(5.1 * each)
    for replayed in (False, True):
        gate = admission.Admission(model, ignore=False, replayed=replayed)
        assert [gate.admits(sequence, [sequence] * n) for n in (3, 4, 5)] == [True, not replayed, False]


def test_a_queued_sequence_starts_when_all_others_are_removed(tiny_models):
    model, _ = tiny_models(0)
    batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=0)
    first, second = batch.insert([PROMPT] * 2, [20, 4])
    batch.next()
    batch.remove([first])
    tokens = []
    while responses := batch.next_generated():
        tokens += [r.token for r in responses]
    assert len(tokens) in (3, 4)  # its first one may have been returned before
    assert first != second
