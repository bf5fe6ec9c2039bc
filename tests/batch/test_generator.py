"""Call `BatchGenerator` as mlx_lm's own callers do, and end its sequences in every way."""

import gc
import types
import weakref

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator as Theirs
from mlx_lm.sample_utils import make_sampler

import mlx_mtp
from mlx_mtp.tuning.plan import Fixed, Plan

PROMPTS = [[1, 2, 3, 0, 2, 4], [2, 2, 1], [3, 0, 1, 2, 2, 1, 0]]


@pytest.fixture
def pair(tiny_models):
    """(model, token ids of the prompts, mlx-lm's model)."""
    model, theirs = tiny_models(0)
    return model, PROMPTS, theirs


def texts(generator, prompts, limits, stops=None) -> tuple[dict, dict]:
    """Generate as a caller of mlx_lm does; return the tokens and the end of each sequence."""
    uids = generator.insert(prompts, max_tokens=limits, stop_sequences=stops)
    found, ends = {uid: [] for uid in uids}, {}
    while responses := generator.next_generated():
        for r in responses:
            found[r.uid].append(r.token)
            if r.finish_reason is not None:
                ends[r.uid] = (r.finish_reason, len(r.all_tokens))
    generator.close()
    return found, ends


def test_it_replaces_mlx_lms(pair):
    """A stop sequence of two tokens ends the first; caches lack the last token, unlike mlx_lm's."""
    model, prompts, theirs = pair
    sampler = make_sampler(temp=0.0)
    first = texts(Theirs(theirs), prompts[:1], [12])[0][0]
    options = {"max_tokens": 9, "stop_tokens": [first[4:6]], "sampler": sampler, "prefill_batch_size": 1}
    expected, their_ends = texts(Theirs(theirs, **options), prompts, [12, 9, 9])
    ours, ends = texts(mlx_mtp.BatchGenerator(model, **options), prompts, [12, 9, 9])
    assert ours == expected
    assert ours[0] == first[: len(ours[0])]
    assert ends[0][0] == "stop"
    assert ends == {uid: (reason, held - 1) for uid, (reason, held) in their_ends.items()}


def test_progress_of_segments_and_counters(pair):
    model, (prompt, *_), _ = pair
    stats = mlx_mtp.Stats()
    batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=2, adaptive=False, stats=stats, prefill_step_size=2)
    with batch.stats() as outer:
        batch.insert_segments([[prompt[:3], prompt[3:]]], [20])
        read, tokens = [], []
        while len(tokens) < 20:
            prompts, responses = batch.next()
            read += [(*r.progress, r.end_of_segment, r.end_of_prompt) for r in prompts]
            tokens += responses
    total = len(prompt)
    assert [r for r in read if r[2]] == [(3, total, True, False), (total, total, True, True)]
    assert read[0] == (2, total, False, False)
    assert outer.prompt_tokens == total
    assert outer.generation_tokens == 20 == len(tokens)
    assert (stats.prompt_tokens, stats.generation_tokens) == (total, 20)
    assert 0 < stats.decode_time < outer.wall_time
    assert stats.drafted == [stats.cycles] * 2
    assert sum(stats.accepted) >= sum(r.from_draft for r in tokens) > 0
    assert [r.token for r in tokens] == [t for t, *_ in mlx_mtp.generate_step(prompt, model, max_tokens=20)]


def test_logprobs_if_requested(pair):
    model, prompts, _ = pair
    batch = mlx_mtp.BatchGenerator(model, logprobs=True, num_draft_tokens=3)
    uids = batch.insert(prompts[:2], [10, 10])
    found = {uid: [] for uid in uids}
    while responses := batch.next_generated():
        for r in responses:
            found[r.uid].append(r.logprobs)
    for uid, prompt in zip(uids, prompts, strict=False):
        options = {"num_draft_tokens": 0, "logprobs": True, "max_tokens": 10}
        alone = [row for _, row, _ in mlx_mtp.generate_step(prompt, model, **options)]
        assert all(mx.array_equal(a, b) for a, b in zip(found[uid], alone, strict=True))


def test_a_sequence_is_removed_before_its_prompt_is_prefilled(pair):
    model, prompts, _ = pair
    batch = mlx_mtp.BatchGenerator(model, prefill_step_size=2)
    uids = batch.insert(prompts[:2], [5, 5])
    batch.next()
    gone = batch.remove(uids, return_prompt_caches=True)
    assert gone[uids[0]][1] == prompts[0][:2]
    assert gone[uids[1]][1] == []
    assert batch.next() == ([], [])
    cache = gone[uids[0]][0]
    again = mlx_mtp.generate_step(prompts[0][2:], model, max_tokens=6, prompt_cache=cache)
    fresh = mlx_mtp.generate_step(prompts[0], model, max_tokens=6)
    assert [t for t, *_ in again] == [t for t, *_ in fresh]


def test_a_cache_is_copied_while_its_sequence_continues(pair):
    """During the prefill and while it decodes."""
    model, prompts, _ = pair
    batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=2, adaptive=False, prefill_step_size=3)
    (uid,) = batch.insert(prompts[:1], [16])
    alone = [token for token, *_ in mlx_mtp.generate_step(prompts[0], model, max_tokens=40)]
    tokens, seen = [], set()
    for _ in range(8):
        tokens += [r.token for r in batch.next()[1]]
        for cache, held in batch.extract_cache([uid]).values():
            assert held == cache.tokens == (prompts[0] + tokens)[: len(held)]
            seen.add(len(held) - len(prompts[0]))
            more = (prompts[0] + tokens)[len(held) :]
            again = mlx_mtp.generate_step(more, model, prompt_cache=cache, max_tokens=3)
            assert [token for token, *_ in again] == alone[len(tokens) : len(tokens) + 3]
    assert tokens == alone[: len(tokens)]
    assert min(seen) < 0 == sorted(seen & {0})[0] < max(seen)


def test_caches_are_quantized_while_sequences_decode(tiny_models):
    """One of them becomes quantized, one is quantized from the prompt on, and a short one never is."""
    model, _ = tiny_models(0, head_dim=32, vocab_size=5)
    options = {"kv_bits": 4, "quantized_kv_start": 12, "num_draft_tokens": 2}
    batch = mlx_mtp.BatchGenerator(model, **options)
    prompts, limits = [[1, 2, 3], [2, 2], [1] * 20], [25, 6, 8]
    found, _ = texts(batch, prompts, limits)
    for uid, (prompt, n) in enumerate(zip(prompts, limits, strict=True)):
        assert found[uid] == [t for t, *_ in mlx_mtp.generate_step(prompt, model, max_tokens=n, **options)]


def test_a_dropped_batch_is_released_at_once(pair):
    """Without a run of the garbage collector."""
    batch = mlx_mtp.BatchGenerator(pair[0])
    batch.insert(PROMPTS, [5] * 3)
    batch.next_generated()
    gone = weakref.ref(batch)
    gc.disable()
    try:
        del batch
        assert gone() is None
    finally:
        gc.enable()


def test_the_cache_of_a_finished_sequence_is_released_while_others_decode(pair, monkeypatch):
    """Its heads were paused, and those of the others draft from then on."""
    turn = iter([0] * 4)
    monkeypatch.setattr(Fixed, "plan", lambda self, *_, **__: Plan(k=next(turn, self.k)))
    batch = mlx_mtp.BatchGenerator(pair[0], num_draft_tokens=2, adaptive=False)
    batch.insert(PROMPTS, [5, 40, 40])
    caches = []
    for _ in range(12):
        caches += [weakref.ref(r.prompt_cache) for r in batch.next_generated() if r.prompt_cache]
    gc.collect()
    assert [cache() for cache in caches] == [None]
    batch.close()


def test_the_control_receives_the_unread_rows_of_all_sequences(pair, monkeypatch):
    """Three sequences whose heads have no row of the prompt: all rows but the newest of each are counted."""
    asked, model = [], pair[0]
    monkeypatch.setattr(Fixed, "plan", lambda self, matched=0, unread=0: asked.append(unread) or Plan(k=self.k))
    batch = mlx_mtp.BatchGenerator(model, num_draft_tokens=2, adaptive=False)
    batch.insert(PROMPTS, [5] * 3)
    while batch.next_generated():
        pass
    assert max(asked) == sum(len(prompt) - 1 for prompt in PROMPTS)


def test_a_sequence_without_a_limit_continues_to_its_stop(pair):
    model, prompts, _ = pair
    alone = [token for token, *_ in mlx_mtp.generate_step(prompts[0], model, max_tokens=30)]
    found, ends = texts(mlx_mtp.BatchGenerator(model), prompts[:1], [-1], [[alone[20:22]]])
    assert found[0] == alone[: len(found[0])]
    assert (found[0][-2:], ends[0][0]) == (alone[20:22], "stop")


def test_ranks_are_refused(pair, monkeypatch):
    """A batch does not support ranks."""
    monkeypatch.setattr(pair[0].runtime, "ranks", types.SimpleNamespace(size=2))
    with pytest.raises(ValueError, match=r"^model: split over 2 ranks; a batch needs one rank"):
        mlx_mtp.BatchGenerator(pair[0])


def test_a_none_among_limits_is_the_generators_own(pair):
    batch = mlx_mtp.BatchGenerator(pair[0], max_tokens=2, logprobs=True)
    uids = batch.insert([[1], [1]], max_tokens=[None, 3], logprobs=[None, False])
    found = []
    while len(found) < 5:
        found += batch.next_generated()
    assert [sum(r.uid == uid for r in found) for uid in uids] == [2, 3]
    assert all((r.logprobs is None) == (r.uid == uids[1]) for r in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[]]}, r"^prompts\[0\]: empty"),
        ({"prompts": [[1], [2]], "max_tokens": [1]}, "^max_tokens: 1 values; expected one for each of 2 prompts"),
        ({"prompts": [[1]], "max_tokens": [0]}, "^max_tokens=0: allowed is 1 or more"),
        ({"prompts": [[1]], "num_draft_tokens": [99]}, "^num_draft_tokens=99: allowed is 0 to 3"),
        *(({"prompts": [[1]], "max_tokens": [value]}, "^max_tokens=.*as an integer") for value in ("3", 2.5, [1])),
        *(({"prompts": [[1]], "seeds": [value]}, "^seed=.*as an integer") for value in ("3", 2.5, [], True)),
        *(({"prompts": [[1]], "logprobs": [value]}, r"^logprobs\[0\]=") for value in ("x", 2, [])),
        *(({"prompts": [[1]], "samplers": [value]}, r"^samplers\[0\]=") for value in ("x", 3)),
        *(({"prompts": [[1]], "logits_processors": [value]}, "^logits_processors") for value in (3, "x", [3])),
        *(({"prompts": [[1]], "stop_sequences": [value]}, "^stop_sequences") for value in (3, "x", ["x"], [[2.5]])),
        ({"prompts": [[1], [2]], "stats": [None, 3]}, r"^stats\[1\]=3: allowed is a Stats"),
        ({"prompts": [[1]], "caches": [3]}, r"^caches\[0\]=3"),
    ],
)
def test_what_it_refuses(pair, arguments, message):
    batch = mlx_mtp.BatchGenerator(pair[0])
    batch.remove(batch.insert([[1]]))  # an index in a message is the prompt's in this call
    with pytest.raises(ValueError, match=message):
        batch.insert(**arguments)
    assert batch.next() == ([], [])
