"""Metal limits the number of buffers: those of a prefix tree are packed, counted and bounded."""

import json
from dataclasses import replace

import families
import mlx.core as mx
import numpy as np
import published
import pytest
import tiny
from mlx.utils import tree_flatten
from prefix_requests import generate, generate_two, prompts, serve
from sweep import sampled

import mlx_mtp
from mlx_mtp.bench.random_model import shaped_model
from mlx_mtp.cache.pieces import ALIGNED, has_rows, packed
from mlx_mtp.cache.prompt_cache import SPILL
from mlx_mtp.checkpoint.inspect import as_text, inspect_checkpoint
from mlx_mtp.decoding.buffer_count import CONVERSATION, LEAST_CHUNK, count_buffers
from mlx_mtp.demo import demo_path
from mlx_mtp.machine.memory import METAL_BUFFERS
from mlx_mtp.serve.prefix_files import PrefixFiles
from mlx_mtp.serve.prefixes import MAX_BUFFERS

pytestmark = pytest.mark.usefixtures("letters_as_tokenizer")
CHUNK = 4  # tokens, of `prefix_requests`
KINDS = ("qwen3_5", "step3p5", "mimo_v2_flash", "glm4_moe")  # states, windows and several heads, rows alone
RELEASED = [file for file in published.FILES if not file.stem.startswith("eagle3")]
MANY = ("step-3.5-flash", "qwen3.5-0.8b")  # several windows, or states
FEW = [file for file in RELEASED if file.stem in MANY]


def real_buffers(arrays):
    """Return the number of separate allocations of evaluated arrays, by their addresses."""
    arrays = [array for array in arrays if array.size]
    mx.eval(arrays)
    spans = sorted((np.asarray(array).__array_interface__["data"][0], array.nbytes) for array in arrays)
    count, end = 0, -1
    for begin, size in spans:
        count += begin >= end + ALIGNED or begin < 0 or end < 0
        end = max(end, begin + size)
    return count


def chunks_of(tree):
    return list(dict.fromkeys(chunk for leaf in tree.leaves() for chunk in leaf.path()))


def arrays_of(chunk):
    rows = [part for parts in chunk.rows for part in parts]
    return [rows, chunk.checkpoint.arrays if chunk.checkpoint else []]


@pytest.fixture(params=KINDS)
def model(request, tmp_path, tiny_models):
    if request.param == "step3p5":
        return tiny_models(vocab_size=40, **tiny.TWO_LAYERS)[0]
    return mlx_mtp.load_model(families.build(request.param, tmp_path)[0])


def test_the_count_equals_that_of_real_arrays(model, tmp_path):
    served, prompt = serve(model), prompts(model.vocab_size)[1]
    generate(served, prompt, turns=tuple(range(CHUNK, len(prompt), CHUNK)))
    tree, tokens = served.tree, len(prompt) - len(prompt) % CHUNK - (len(prompt) % CHUNK == 0) * CHUNK
    found = chunks_of(tree)
    assert len(found) == tokens // CHUNK == tree.chunks
    estimate = count_buffers(tree.blank, tokens, CHUNK)
    assert tree.buffers == estimate.prefixes == sum(chunk.buffers for chunk in found)
    assert tree.buffers == sum(real_buffers(group) for chunk in found for group in arrays_of(chunk))
    assert estimate.weights == len({id(array) for _, array in tree_flatten(model.parameters())})
    cache = tree.blank.like_new()
    options = {"prompt_cache": cache, "num_draft_tokens": len(cache.heads), "adaptive": False, "max_tokens": 9}
    list(mlx_mtp.generate_step(prompt, model, **options))
    assert cache.heads
    assert len(cache.backlog) <= SPILL
    held = [*cache.kept, *(part for c in cache.caches for part in c.parts)]
    most = len({id(array) for array in held}) + SPILL
    assert most <= estimate.caches <= most + sum(c.is_state for c in cache.caches)  # some tapes are freed at rest
    files = PrefixFiles(tmp_path / "files", 1 << 30)
    files.save(tree)
    again = serve(model, files=files)
    files.load(again.tree, prompt)
    assert again.tree.buffers == tree.buffers
    assert again.tree.buffers == sum(real_buffers(g) for chunk in chunks_of(again.tree) for g in arrays_of(chunk))


def test_inspect_states_the_estimate():
    path = demo_path()
    facts, blank = inspect_checkpoint(path), mlx_mtp.make_prompt_cache(mlx_mtp.load_model(path))
    assert facts.buffers == count_buffers(blank, facts.longest, LEAST_CHUNK)
    assert f"about {facts.buffers.total:,} of Metal's 499,000" in as_text(facts)


def test_copies_in_one_buffer_have_equal_values_and_are_aligned():
    rng = np.random.default_rng(0)
    given = [mx.array(rng.normal(size=shape).astype(np.float32)) for shape in ((1, 2, 3, 5), (7,), (64,), (1, 1))]
    given += [mx.arange(3), mx.array([9]), given[0][:, :, 1:2], given[1], mx.zeros((0, 4))]
    copies = packed(given)
    mx.eval(copies)
    assert all(mx.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(given, copies, strict=True))
    floats = [np.asarray(a).__array_interface__["data"][0] for a in copies if a.dtype == mx.float32 and a.size]
    assert all((place - min(floats)) % ALIGNED == 0 for place in floats)
    assert floats[1] == floats[-1], "the same array twice is one copy"
    assert not set(floats) & {np.asarray(a).__array_interface__["data"][0] for a in given if a.size}
    assert packed([]) == []


@pytest.mark.parametrize("model", sampled(KINDS[:2], KINDS), indirect=True)
def test_the_least_recently_used_chunks_are_evicted_above_the_buffer_limit(model):
    served = serve(model)
    texts = [np.random.default_rng(seed).integers(0, model.vocab_size, 21).tolist() for seed in range(4)]
    generate_two(served, texts[0])
    tree = served.tree
    tree.max_buffers = 2 * tree.buffers
    for text in texts[1:]:
        generate_two(served, text)
        assert tree.buffers <= tree.max_buffers
    held = [tree.covered(text) for text in texts]
    assert held[0] == 0
    assert held[-1] == 20
    assert tree.buffers == sum(chunk.buffers for chunk in chunks_of(tree))
    tree.clear()
    assert tree.buffers == 0


@pytest.mark.parametrize("file", sampled(FEW, RELEASED), ids=lambda file: file.stem)
def test_a_long_conversation_and_a_full_prefix_cache_use_a_tenth_of_the_limit(file, tmp_path):
    """With the server's smallest chunks, and with quantized keys and values if the family supports them."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(published.read_config(file)))
    model, _ = shaped_model(config, bits=4)
    layout = {} if model.NO_KV_BITS else {"kv_bits": 8}
    blank = mlx_mtp.make_prompt_cache(model, **layout)
    found = count_buffers(blank, CONVERSATION, LEAST_CHUNK)
    recurrent = (
        CONVERSATION // LEAST_CHUNK * (not all(has_rows(c) for c in blank.caches))
    )  # one more dtype in 16 bits
    assert found.prefixes + recurrent <= MAX_BUFFERS, "the conversation itself would not fit"
    several = 8 * found.caches + 3 * found.recordings  # active requests, and recordings of more threads
    assert replace(found, prefixes=MAX_BUFFERS).total + several < METAL_BUFFERS // 10
