"""Compare the estimated memory of a model with its real memory; estimates read no weights."""

import re

import families
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from sweep import SWEEP, sampled

import mlx_mtp
from bench import which_model
from mlx_mtp.cache.recurrent import RecurrentCache
from mlx_mtp.decoding import graph_memory, memory_needs
from mlx_mtp.decoding.memory_needs import Budget, needs, within
from mlx_mtp.machine import memory

# Heads, experts, windows, latent rows, an indexer, recurrent states: what families keep or make.
NAMES = ("glm4_moe", "deepseek_v32", "qwen3_5", "mimo_v2_flash")
LAYOUTS = ({}, {"kv_bits": 8}, {"kv_bits": 4, "quantized_kv_start": 300, "mtp_kv_bits": 8}, {"max_kv_size": 40})


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """By name: (directory, loaded model, the model with its weights still on disk)."""
    made = {}

    def build(name):
        if name not in made:
            path = families.build(name, tmp_path_factory.mktemp("model"))[0]
            made[name] = (path, mlx_mtp.load_model(path), mlx_mtp.load_model(path, lazy=True))
        return made[name]

    return build


def read(model, prompt, n=1, **options):
    return list(mlx_mtp.generate_step(prompt, model, max_tokens=n, adaptive=False, **options))


def kept_of_a_verify(cache: RecurrentCache) -> int:
    """Return the bytes that a verify adds to a cache: its rows, and the states after each."""
    convolved = cache.parts[2]
    lacks = memory_needs.VERIFIED - (cache.tape[0].shape[1] if cache.tape else 0)
    each = sum(a.nbytes // a.shape[1] for a in cache.tape) or cache.committed.nbytes
    return lacks * (each + convolved.nbytes // convolved.shape[1])


@pytest.mark.parametrize("name", sampled(NAMES[::2], NAMES))
def test_the_estimate_equals_the_memory(built, name):
    """Weights and caches to the byte, with what a state keeps of a verify; scratch near."""
    _, model, lazy = built(name)
    context, chunk = (700, 128) if SWEEP else (400, 64)
    before = mx.get_active_memory()
    estimate = needs(lazy, context, chunk=chunk)
    assert mx.get_active_memory() - before < 20_000  # constants, and no weight
    assert estimate == needs(model, context, chunk=chunk)
    assert estimate.weights + estimate.heads == sum(a.nbytes for _, a in tree_flatten(model.parameters()))
    cache = mlx_mtp.make_prompt_cache(model)
    mx.clear_cache()
    active = mx.get_active_memory()
    prompt, stats, of_trees = [i % 7 for i in range(context - 20)], mlx_mtp.Stats(), mlx_mtp.Stats()
    read(model, prompt, 20, prefill_step_size=chunk, stats=of_trees, tree=16)
    read(model, prompt, 20, prompt_cache=cache, prefill_step_size=chunk, stats=stats)
    assert of_trees.trees
    kv = sum(c.nbytes for c in cache.layers)
    assert estimate.kv == kv + sum(kept_of_a_verify(c) for c in cache.layers if isinstance(c, RecurrentCache))
    assert sum(c.nbytes for c in cache.heads) <= estimate.head_kv
    taken = max(stats.peak_memory, of_trees.peak_memory) - active
    assert 0.9 * taken < estimate.kv + estimate.head_kv + estimate.scratch < 2.2 * taken
    for positions, rows in ((1, 1), (context, chunk), (5000, 1), (5000, 2048)):
        given = lazy, cache, positions, rows
        assert sum(memory_needs._caches_and_scratch(*given)) < memory_needs._upper_bound(*given), rows


def test_a_released_recurrent_model_needs_more_memory_for_larger_chunks():
    """A CPU's graph of a layer that loops over rows is extrapolated from few rows, which must not mislead."""
    model = which_model.quantized("qwen3.5-0.8b", bits=4)
    needed = [needs(model, 8000, chunk=chunk).scratch for chunk in (32, 2048)]
    assert 0 < needed[0] < needed[1]


@pytest.mark.parametrize("layout", sampled(LAYOUTS[::2], LAYOUTS))
def test_caches_of_every_layout(tiny_models, layout):
    model, _ = tiny_models(0, head_dim=32, vocab_size=5)
    for context in sampled((40, 290), (40, 290, 600)):
        cache = mlx_mtp.make_prompt_cache(model, kv_group_size=32, **layout)
        sizes = []
        note = lambda *_, cache=cache, sizes=sizes: sizes.append(sum(c.nbytes for c in cache.layers))  # noqa: E731
        read(model, [i % 5 for i in range(context - 9)], 9, prompt_cache=cache, prompt_progress_callback=note)
        note()
        estimate = needs(model, context, **layout)
        assert estimate.kv == max(sizes), context
        assert sum(c.nbytes for c in cache.heads) <= estimate.head_kv


def test_positions_before_the_first_quantized_one_need_what_plain_caches_need(tiny_models):
    """The next position quantizes the caches, which changes the temporary arrays."""
    model, _ = tiny_models(0, head_dim=32, vocab_size=5)
    quantized = [needs(model, n, kv_bits=4, kv_group_size=32, quantized_kv_start=40) for n in (40, 41)]
    assert quantized[0] == needs(model, 40)
    assert quantized[1].scratch != needs(model, 41).scratch


def test_a_prompt_that_is_to_be_quantized_is_not_held_whole_before(tiny_models):
    model, _ = tiny_models(0, head_dim=32, vocab_size=5)
    cache = mlx_mtp.make_prompt_cache(model, kv_bits=4, kv_group_size=32, quantized_kv_start=10)
    sizes = []
    prompt = [i % 5 for i in range(600)]
    progress = lambda *_: sizes.append(cache.nbytes)  # noqa: E731
    read(model, prompt, 0, prompt_cache=cache, prefill_step_size=200, prompt_progress_callback=progress)
    full = mlx_mtp.make_prompt_cache(model)
    read(model, prompt, 0, prompt_cache=full)
    assert max(sizes) < full.nbytes / 2


def test_an_estimate_changes_nothing(built, machine):
    _, model, _ = built("qwen3_5")
    cache = mlx_mtp.make_prompt_cache(model)
    read(model, [1, 2, 3], 4, prompt_cache=cache, num_draft_tokens=2)
    before = [id(a) for _, a in tree_flatten(model.parameters())], [id(p) for c in cache.caches for p in c.parts]
    machine(memory_needs._upper_bound(model, cache, 5001, 64) - cache.nbytes)
    memory_needs.check_prompt(model, cache, 5000, 1, 64, ignore=False)
    after = [id(a) for _, a in tree_flatten(model.parameters())], [id(p) for c in cache.caches for p in c.parts]
    assert before == after
    expected = [t for t, *_ in read(model, [1, 2, 3], 16, num_draft_tokens=0)]
    assert [t for t, *_ in read(model, expected[3:4], 12, prompt_cache=cache, num_draft_tokens=2)] == expected[4:]


def graph(*operations, kept):
    """Return events as MLX exports them, from (name, inputs, {output: bytes})."""
    events = [{"type": "inputs", "inputs": []}]
    for name, reads, makes in operations:
        outputs = [(array, (size,), mx.uint8) for array, size in makes.items()]
        inputs = [(array, (1,), mx.uint8) for array in reads]
        events.append({"type": "primitive", "name": name, "inputs": inputs, "outputs": outputs})
    return [*events, {"type": "outputs", "outputs": [(array, (1,), mx.uint8) for array in kept]}]


def test_the_peak_of_a_graph(monkeypatch):
    monkeypatch.setattr(graph_memory, "LAG", 0)
    product = ("Matmul", ["weights", "in"], {"a": 100})
    chain = (product, ("Matmul", ["a"], {"b": 50}), ("Matmul", ["b"], {"c": 10}))
    assert graph_memory.peak(graph(*chain, kept=["c"])) == 150
    assert graph_memory.peak(graph(*chain, kept=["c", "a"])) == 160
    assert graph_memory.peak(graph(product, ("Add", ["a"], {"b": 100}), kept=["b"])) == 100  # in place
    assert graph_memory.peak(graph(product, ("Add", ["a"], {"b": 100}), kept=["b", "a"])) == 200
    assert graph_memory.peak(graph(product, ("Reshape", ["a"], {"v": 100}), *chain[1:2], kept=["v"])) == 150
    written = (product, ("SliceUpdate", ["cache", "a"], {"cache2": 10**9}), ("Matmul", ["cache2"], {"d": 1}))
    assert graph_memory.peak(graph(*written, kept=["d", "cache2"])) == 100
    unused = (product, ("Split", ["a"], {"v": 50, "w": 50}), ("Matmul", ["v"], {"b": 30}))
    assert graph_memory.peak(graph(*unused, kept=["b"])) == 130
    monkeypatch.setattr(graph_memory, "LAG", 5)
    assert graph_memory.peak(graph(*chain, kept=["c"])) == 160


@pytest.mark.parametrize("layout", [{}, {"kv_bits": 4}])
def test_the_largest_context_that_fits(tiny_models, layout):
    model, _ = tiny_models(0, head_dim=32, vocab_size=5)
    chunk = 64
    weights = needs(model, 0).total
    assert memory_needs.largest_context(model, weights, chunk=chunk, **layout) == 0
    for size in sampled((12 * weights, 10**7), (12 * weights, 10**7, 3 * 10**7)):
        found = memory_needs.largest_context(model, size, chunk=chunk, **layout)
        assert found % memory_needs.GRAIN == 0
        assert needs(model, found, chunk=chunk, **layout).total <= size
        assert needs(model, found * 5 // 4 + 512, chunk=chunk, **layout).total > size
        for longest, expected in ((found - 100, found - 100), (2 * found + 1024, found)):
            assert memory_needs.largest_context(model, size, chunk=chunk, longest=longest, **layout) == expected


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(built, machine):
    path, model, _ = built("mimo_v2_flash")
    weights = needs(model, 0)
    machine(weights.total)
    mlx_mtp.load_model(path)
    machine(weights.total - 1)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    refusal = r"0\.\d+ GB \(weights .*, heads .*\) needed, 0\.\d+ GB available \(a test\); no context fits; MLX_MTP_I"
    with pytest.raises(ValueError, match=refusal) as e:
        mlx_mtp.load_model(path)
    assert str(path) in str(e.value)
    assert "\n" not in str(e.value)
    assert max(mx.get_active_memory(), mx.get_peak_memory()) - before < weights.total / 10
    mlx_mtp.load_model(path, budget=Budget(ignore=True))
    mlx_mtp.load_model(path, lazy=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(memory.IGNORE, "1")
        mlx_mtp.load_model(path)
        patch.setenv(memory.IGNORE, "0")
        with pytest.raises(ValueError, match="needed"):
            mlx_mtp.load_model(path)


def test_what_would_fit_fits(tiny_models, machine):
    """The contexts in the message of a refusal fit, with the caches in it."""
    model, _ = tiny_models(0, head_dim=64, vocab_size=5)
    asked = Budget(20000, 16)
    machine(needs(model, 5000, chunk=16).total)
    with pytest.raises(ValueError, match=r"needed with max_context=20000, ") as e:
        asked.check(model, "here")
    plain, *quantized = re.findall(r"max_context=(\d+) fits|(\d+) with kv_bits=(\d)", str(e.value))[1 - 1 :]
    Budget(int(plain[0]), 16).check(model, "here")
    assert len(quantized) == 2
    for _, context, bits in quantized:
        assert int(context) > int(plain[0])
        Budget(int(context), 16, {"kv_bits": int(bits)}).check(model, "here")


def test_caches_that_cannot_be_are_refused_before_anything_is_read(built):
    path, *_ = built("deepseek_v3")
    before = mx.get_active_memory()
    with pytest.raises(ValueError, match="kv_bits=4: not with multi-head latent attention"):
        mlx_mtp.load_model(path, budget=Budget(layout={"kv_bits": 4}))
    assert mx.get_active_memory() - before < 20_000


def test_the_number_of_tokens_that_max_context_leaves():
    """The rule: held + prompt + max_tokens <= max_context; no limit counts as one token."""
    for most in (1, 5, 9):
        for held in range(4):
            for prompt in range(1, 6):
                for asked in (-1, 0, 1, 3):
                    left = most - held - prompt
                    if left >= (1 if asked == -1 else asked):
                        assert within(most, held, prompt, asked) == (left if asked == -1 else asked)
                    else:
                        with pytest.raises(ValueError, match=f"max_context={most}: {prompt} tokens.* are more"):
                            within(most, held, prompt, asked)
    assert within(None, 10**9, 10**9, -1) == -1
    with pytest.raises(ValueError, match="allowed is 1 or more"):
        within(0, 0, 1, 0)


def test_a_prompt_that_does_not_fit_fails_before_it_starts(tiny_models, machine):
    model, _ = tiny_models(0, head_dim=32, vocab_size=5)
    huge, calls = [i % 5 for i in range(100_000)], []
    cache = mlx_mtp.make_prompt_cache(model)
    options = {"prompt_cache": cache, "prompt_progress_callback": lambda *_: calls.append(1)}
    with pytest.raises(ValueError, match="max_context=64: 100000 tokens and max_tokens=256 are more"):
        mlx_mtp.generate_step(huge, model, max_context=64, **options)
    machine(10**6)
    with pytest.raises(
        ValueError, match=r"prompt: 100000 tokens and max_tokens=-1: .* GB needed in addition to the model, 0\.0"
    ):
        mlx_mtp.generate_step(huge, model, max_tokens=-1, **options)
    mlx_mtp.generate_step(huge, model, max_tokens=-1, check_memory=False, **options).close()
    assert not calls
    assert not cache.layers[0].parts
    assert len(read(model, [1, 2], 3, prompt_cache=cache)) == 3


def test_a_prompt_of_the_stated_length_fits(tiny_models, machine):
    model, _ = tiny_models(0, head_dim=32, vocab_size=5)
    cache = mlx_mtp.make_prompt_cache(model, kv_bits=8, kv_group_size=32)
    read(model, [1, 2, 3], 2, prompt_cache=cache)
    machine(6 * 10**7)
    options = {"prompt_cache": cache, "prefill_step_size": 64, "max_tokens": 5}
    with pytest.raises(ValueError, match=r"after 4 in the cache .*; \d+ tokens in all fit; ") as e:
        mlx_mtp.generate_step([1] * 60_000, model, **options)
    fits = int(re.findall(r"(\d+) tokens in all", str(e.value))[0])
    assert fits > memory_needs.UNCHECKED
    mlx_mtp.generate_step([1] * (fits - 9), model, **options).close()
    with pytest.raises(ValueError, match="tokens in all fit"):
        mlx_mtp.generate_step([1] * (fits * 5 // 4), model, **options)


@pytest.mark.parametrize("k", [0, 3])
def test_no_limit_ends_at_max_context(tiny_models, k):
    model, _ = tiny_models(0, head_dim=32, vocab_size=5)
    cache = mlx_mtp.make_prompt_cache(model)
    whole = [t for t, *_ in read(model, [1, 2, 3], 19, num_draft_tokens=0)]
    found = [t for t, *_ in read(model, [1, 2, 3], -1, num_draft_tokens=k, max_context=20, prompt_cache=cache)]
    assert found == whole[:17]
    with pytest.raises(ValueError, match="max_context=20: 1 tokens after 19 in the cache and a new one are more"):
        read(model, found[-1:], -1, max_context=20, prompt_cache=cache)
    assert [t for t, *_ in read(model, found[-1:], -1, max_context=22, prompt_cache=cache)] == whole[17:19]


def test_the_peak_is_the_generations_own(tiny_models):
    model, _ = tiny_models(0, head_dim=32, vocab_size=5)
    big, small = mlx_mtp.Stats(), mlx_mtp.Stats()
    read(model, [i % 5 for i in range(600)], 2, stats=big)
    peak = big.peak_memory
    mx.clear_cache()
    read(model, [1, 2, 3], 2, stats=small)
    assert small.peak_memory < big.peak_memory == peak
    assert small.peak_memory >= sum(a.nbytes for _, a in tree_flatten(model.parameters()))
