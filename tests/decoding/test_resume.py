"""A stop anywhere leaves the caches as if every token had been decoded on its own."""

import itertools

import families
import mlx.core as mx
import pytest
from sweep import SWEEP, sampled, sweep

import mlx_mtp
from mlx_mtp.cache.file import save_prompt_cache
from mlx_mtp.decoding.prompt_file import load_prompt_cache

PROMPT = [1, 2, 3, 0, 2, 2, 1, 3, 0, 1, 2]


def texts(model, prompt, n, k, cache=None, **options):
    steps = mlx_mtp.generate_step(
        prompt, model, max_tokens=n, num_draft_tokens=k, adaptive=False, prompt_cache=cache, **options
    )
    return [token for token, _, _ in steps]


@pytest.fixture(scope="module")
def model_and_truth(tiny_models):
    # Of these seeds' heads many drafts are right, so that stops fall inside accepted runs.
    model, _ = tiny_models(2, vocab_size=5)
    return model, texts(model, PROMPT, 40, 0)


HOW = ("max_tokens", "close", "stop_tokens")


@pytest.mark.parametrize(
    ("how", "k"), sampled([*zip(HOW, (1, 3, 0), strict=True)][:2], itertools.product(HOW, (0, 1, 3)))
)
def test_stop_anywhere_then_continue(model_and_truth, k, how):
    model, truth = model_and_truth
    for n in range(1, 34 if SWEEP else 22, (1 if SWEEP else 5) if (k, how) == (3, "close") else 7 if SWEEP else 10):
        cache = mlx_mtp.make_prompt_cache(model)
        if how == "max_tokens":
            first = texts(model, PROMPT, n, k, cache)
        elif how == "stop_tokens":
            first = texts(model, PROMPT, 40, k, cache, stop_tokens={truth[n - 1]})
        else:
            steps = mlx_mtp.generate_step(
                PROMPT, model, max_tokens=40, num_draft_tokens=k, adaptive=False, prompt_cache=cache
            )
            first = [next(steps)[0] for _ in range(n)]
            steps.close()
        assert first == truth[: len(first)]
        assert cache.tokens == PROMPT + first[:-1]
        assert all(c.offset == cache.offset for c in cache.layers)
        rest = truth[len(first) :][:9]  # past a window
        assert texts(model, first[-1:], len(rest), 3, cache) == rest


@sweep
def test_stopped_caches_hold_the_same_rows(model_and_truth):
    """Keys and values equal those of plain decoding."""
    model, _ = model_and_truth
    for n in range(1, 24, 1 if SWEEP else 7):
        caches = [mlx_mtp.make_prompt_cache(model) for _ in range(2)]
        for k, cache in zip((0, 3), caches, strict=True):
            texts(model, PROMPT, n, k, cache)
        for one, run in zip(caches[0].layers, caches[1].layers, strict=True):
            last = range(max(0, one.offset - 8), one.offset)
            slots = mx.array([p % one.ring.slots if hasattr(one, "ring") else p for p in last])
            for a, b in zip(one.parts, run.parts, strict=True):
                assert mx.allclose(mx.take(a, slots, axis=2), mx.take(b, slots, axis=2), atol=1e-5)


def test_accepted_runs_were_cut(model_and_truth):
    """The tests above need stops inside accepted drafts."""
    model, _ = model_and_truth
    stats = mlx_mtp.Stats()
    texts(model, PROMPT, 30, 3, stats=stats)
    assert stats.accepted[1] > 0


@sweep
def test_a_new_turn_on_a_live_cache(tiny_models):
    model, _ = tiny_models(0)
    for first, second in sampled([(0, 3), (3, 0)], [(0, 3), (3, 0), (3, 3), (1, 2)]):
        cache = mlx_mtp.make_prompt_cache(model)
        answer = texts(model, PROMPT, 11, first, cache)
        turn = [*answer[-1:], 4, 4, 0, 1]
        expected = texts(model, PROMPT + answer[:-1] + turn, 12, 0)
        assert texts(model, turn, 12, second, cache) == expected, (first, second)


def test_continuing_with_another_token_than_the_one_yielded(tiny_models):
    """The last token yielded is not in the cache: an editor may replace it."""
    model, _ = tiny_models(0)
    cache = mlx_mtp.make_prompt_cache(model)
    answer = texts(model, PROMPT, 12, 3, cache)
    other = (answer[-1] + 1) % 5
    expected = texts(model, [*PROMPT, *answer[:-1], other], 20, 0)
    assert texts(model, [other], 20, 3, cache) == expected


@pytest.mark.parametrize("bits", sampled([8], [None, 8]))
def test_saved_and_loaded(tiny_models, tmp_path, bits):
    model, _ = tiny_models(0, head_dim=32, vocab_size=5)
    cache = mlx_mtp.make_prompt_cache(model, kv_bits=bits, mtp_kv_bits=bits, kv_group_size=32)
    answer = texts(model, PROMPT, 21, 3, cache)
    save_prompt_cache(tmp_path / "cache.safetensors", cache)
    again = load_prompt_cache(tmp_path / "cache.safetensors", model)
    assert again.tokens == cache.tokens
    assert again.nbytes <= cache.nbytes
    stats, other = mlx_mtp.Stats(), mlx_mtp.Stats()
    rest = texts(model, answer[-1:], 24, 3, cache, stats=stats)
    assert texts(model, answer[-1:], 24, 3, again, stats=other) == rest
    assert stats.accepted == other.accepted


def test_a_ring_that_is_not_full_is_saved_whole(tiny_models, tmp_path):
    """A ring of more slots than one growth of a buffer: unused slots must be saved too."""
    model, _ = tiny_models(0, sliding_window=300)
    cache, prompt = mlx_mtp.make_prompt_cache(model), [i % 5 for i in range(200)]
    answer = texts(model, prompt, 1, 0, cache)
    save_prompt_cache(tmp_path / "cache.safetensors", cache)
    again = load_prompt_cache(tmp_path / "cache.safetensors", model)
    turn = [*answer, *prompt]
    assert texts(model, turn, 9, 3, again) == texts(model, turn, 9, 3, cache)


def test_not_a_cache_file(tiny_models, tmp_path):
    model, _ = tiny_models(0)
    file = tmp_path / "x.safetensors"
    mx.save_safetensors(str(file), {"a": mx.zeros(3)})
    with pytest.raises(ValueError, match=r"x\.safetensors: not a prompt cache"):
        load_prompt_cache(file, model)


def test_interrupted_prefill_keeps_whole_chunks(tiny_models):
    model, _ = tiny_models(0)
    cache = mlx_mtp.make_prompt_cache(model)
    prompt = [i % 5 for i in range(40)]

    def interrupt(done, total):
        if done >= 16:
            raise KeyboardInterrupt

    steps = mlx_mtp.generate_step(
        prompt, model, prompt_cache=cache, prefill_step_size=8, prompt_progress_callback=interrupt
    )
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    assert cache.tokens == prompt[:16]
    assert texts(model, prompt[16:], 20, 3, cache) == texts(model, prompt, 20, 0)


@pytest.mark.parametrize("where", ["progress", "sampler"])
def test_interrupted_after_the_last_chunk(tiny_models, where):
    """The prompt is prefilled; its last row must not be lost for the heads."""
    model, _ = tiny_models(2, vocab_size=5)
    prompt = [i % 5 for i in range(20)]

    def interrupt(*counts):
        if where == "sampler" or counts[0] == counts[1]:
            raise KeyboardInterrupt

    counts = {}
    for interrupted in (True, False):
        cache = mlx_mtp.make_prompt_cache(model)
        options = {"prompt_progress_callback": interrupt} if where == "progress" else {"sampler": interrupt}
        if interrupted:
            with pytest.raises(KeyboardInterrupt):
                next(mlx_mtp.generate_step(prompt, model, prompt_cache=cache, **options))
        else:
            texts(model, prompt, 0, 0, cache)
        assert cache.tokens == prompt
        counts[interrupted] = mlx_mtp.Stats()
        texts(model, [1, 2], 16, 3, cache, stats=counts[interrupted])
    assert counts[True].accepted == counts[False].accepted
    assert sum(counts[True].accepted) > 0


def test_a_sampler_that_fails_leaves_the_last_state(tiny_models):
    model, _ = tiny_models(0)
    cache = mlx_mtp.make_prompt_cache(model)
    calls = []

    def sampler(logprobs):
        calls.append(1)
        if len(calls) > 30:
            raise RuntimeError("no")
        return mx.argmax(logprobs, axis=-1)

    steps = mlx_mtp.generate_step(PROMPT, model, prompt_cache=cache, sampler=sampler, adaptive=False)
    got = []
    with pytest.raises(RuntimeError, match="no"):
        got.extend(token for token, _, _ in steps)
    assert cache.tokens == PROMPT + got[:-1]
    assert texts(model, got[-1:], 20, 3, cache) == texts(model, PROMPT + got, 20, 0)


def test_a_cache_of_another_model_is_refused(tmp_path):
    """Both models have the same number of layers and heads."""
    models = [mlx_mtp.load_model(families.build(name, tmp_path / name)[0]) for name in ("mimo", "deepseek_v3")]
    cache = mlx_mtp.make_prompt_cache(models[0])
    texts(models[0], [1, 2, 3], 4, 1, cache)
    save_prompt_cache(tmp_path / "cache.safetensors", cache)
    load_prompt_cache(tmp_path / "cache.safetensors", models[0])
    with pytest.raises(ValueError, match=r"cache\.safetensors: made with another model"):
        load_prompt_cache(tmp_path / "cache.safetensors", models[1])
