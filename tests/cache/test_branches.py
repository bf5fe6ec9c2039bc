"""Rows of a tree: each has the bits of plain decoding of its path, which can be kept as if it had been read."""

import random
from types import SimpleNamespace

import families
import mlx.core as mx
import numpy as np
import pytest
from picture_prompts import pictured
from subjects import PROMPT, quantizable_model, subjects
from sweep import sampled
from tree_drafts import assert_equal, decoded

import mlx_mtp
from mlx_mtp.cache.beams import branched
from mlx_mtp.cache.branches import COPIES, copied_bytes, hidden_of_tree, rows_with_room
from mlx_mtp.cache.growing import LinearKVCache
from mlx_mtp.cache.pool import Pool
from mlx_mtp.cache.slots import PooledKV, Span
from mlx_mtp.cache.tree import RowTree, along

NAMES = ["step3p5", "qwen3_next", "nemotron_h_latent", "glm_moe_dsa_shared", "mimo_v2_flash"]
LONG = PROMPT * 4  # the windows of 8, in rings of 40 slots, wrap inside the tree or just before it

FULL = PROMPT * 23  # 253 tokens: buffers of 256 positions grow in the tree


@pytest.fixture(scope="module")
def subject(tiny_models, tmp_path_factory):
    return subjects(tiny_models, tmp_path_factory)


def random_parents(rng: random.Random, k: int) -> list[int]:
    kind = rng.choice(["any", "deep", "star", "chain"])
    rows = {"chain": lambda i: i, "deep": lambda i: rng.randint(max(0, i - 2), i), "star": lambda i: 0}
    return [rows.get(kind, lambda i: rng.randint(0, i))(i) for i in range(k)]


def path_to(parents: list[int], row: int) -> list[int]:
    return [*path_to(parents, parents[row - 1]), row] if row else [0]


def read(model, prompt: list[int], **layout):
    """Return a cache of a prompt's tokens."""
    return decoded(model, prompt, 0, mlx_mtp.make_prompt_cache(model, **layout), num_draft_tokens=0)[1]


def plain_rows(model, cache, tokens: list[int]) -> tuple[mx.array, mlx_mtp.PromptCache]:
    """Return hidden rows [T, H] of tokens that are decoded one by one after a copy of a cache, and that copy."""
    cache = cache.copy()
    rows = [model.hidden(mx.array([[token]]), cache.layers)[0] for token in tokens]
    cache.settle(cache.tokens + tokens)
    return mx.concatenate(rows), cache


def test_a_tree_lists_each_rows_path():
    rng = random.Random(0)
    for k in range(1, 16):
        parents = [random_parents(rng, k) for _ in range(3)]
        paths = [[path_to(each, row) for row in range(k + 1)] for each in parents]
        levels = max(len(path) - 1 for each in paths for path in each)
        for spare in (0, 2):
            tree = RowTree.of(mx.array(parents), levels + spare)
            assert (tree.rows, tree.levels) == (k + 1, levels + spare + 1)
            assert tree.depth.tolist() == [[len(path) - 1 for path in each] for each in paths]
            full = [[path + path[-1:] * (levels + spare + 1 - len(path)) for path in each] for each in paths]
            assert tree.ancestors.tolist() == full
            assert tree.parents.tolist() == parents


def test_rows_along_an_index():
    rows, index = (
        np.random.default_rng(0).normal(size=(3, 5, 2, 4)),
        np.array([[[4, 0], [1, 1]]] * 2 + [[[2, 3]] * 2]),
    )
    expected = np.stack([own[i] for own, i in zip(rows, index, strict=True)])
    assert np.array_equal(along(mx.array(rows), mx.array(index)), mx.array(expected))


def test_texts_continue_copies_of_their_sequences():
    """Each copy has the rows, position, shift and start of the sequence that its text continues."""
    pool, index, slots = PooledKV(), mx.array([1, 0, 1]), [3, 1, 3]
    pool.parts = mx.random.normal((5, 1, 256, 4)), mx.random.normal((5, 1, 256, 2))
    pool.span, pool.start, pool.shift = Span([1, 3], 5), mx.array([2, 1]).reshape(-1, 1, 1, 1), mx.array([4, 20])
    pool.seek(mx.array([9, 6]), 10)
    (made,) = branched([pool], index, pool.offset, 1)
    assert made.position.tolist() == [26, 13, 26]
    assert made.make_mask(1).sum(axis=-1).flatten().tolist() == [6, 8, 6]
    new = mx.random.normal((3, 1, 1, 4)), mx.random.normal((3, 1, 1, 2))
    for found, part, rows in zip(made.update_and_fetch(*new), pool.parts, new, strict=True):
        for i, (slot, offset) in enumerate(zip(slots, (6, 9, 6), strict=True)):
            held = mx.concatenate([part[slot, :, :offset], rows[i]], axis=1)
            assert mx.array_equal(found[i, :, : offset + 1], held)
    alone = LinearKVCache(2)
    alone.parts = tuple(part[:1] for part in pool.parts)
    alone.seek(mx.array([5]), 5)
    (made,) = branched([alone], mx.array([0, 0]), alone.offset, 1)
    assert made.make_mask(1).sum(axis=-1).flatten().tolist() == [4, 4]


def test_copies_of_caches_have_a_limit():
    for sizes, rows in (((0,), 16), ((5, COPIES // 3, 7), 3), ((COPIES // 20, 1), 16), ((1, COPIES + 1), 0)):
        layers = [SimpleNamespace(nbytes=size) for size in sizes]
        assert rows_with_room(layers) == rows
        assert copied_bytes(layers) == 2 * rows * max(sizes)


def cases(tiny_models, subject):
    """Yield (model, plain model or None for bits that no cacheless forward has, prompt, layout)."""
    for name in sampled(NAMES, ["step3p5", *families.FAMILIES]):
        for prompt in sampled([LONG[:36]], [PROMPT[:1], PROMPT, LONG[:36], LONG]):
            yield subject(name).model, subject(name).plain, prompt, {}
    yield subject("step3p5").model, subject("step3p5").plain, FULL, {}
    yield pictured().model, None, PROMPT, {}  # RoPE positions may be shifted
    model, _ = quantizable_model(tiny_models)
    for layout in ({"kv_bits": 4}, {"max_kv_size": 12}, {"kv_bits": 8, "max_kv_size": 12}):
        for prompt in sampled([LONG[:36]], [PROMPT[:1], PROMPT, LONG[:36], LONG]):
            yield model, None, prompt, layout


def test_rows_have_the_bits_of_their_paths(tiny_models, subject):
    rng = random.Random(3)
    for model, plain, prompt, layout in cases(tiny_models, subject):
        for _ in range(sampled([1], [8])[0]):
            k = rng.choice([3, 7, 15])
            parents, tokens = random_parents(rng, k), [rng.randrange(model.vocab_size) for _ in range(k + 1)]
            tree = RowTree.of(mx.array([parents]), max(len(path_to(parents, row)) for row in range(k + 1)) - 1)
            before = read(model, prompt, **layout)
            cache = before.copy()
            cache.to_device()
            hidden = hidden_of_tree(model, cache.layers, mx.array([tokens]), tree)[0]
            assert {c.limit for c in cache.layers} == {len(prompt) + tree.levels}
            after = cache.unload()
            for row in {k, *rng.sample(range(k + 1), 3)}:
                path = path_to(parents, row)
                rows, alone = plain_rows(model, before, [tokens[i] for i in path])
                assert mx.array_equal(hidden[mx.array(path)], rows)
                if plain is not None:
                    logits = plain(mx.array([[*prompt, *(tokens[i] for i in path)]]))[0, -1]
                    assert mx.allclose(model.logits(hidden[row][None, None])[0, 0], logits, rtol=1e-3, atol=1e-4)
                kept = cache.copy()
                end = len(prompt) + tree.levels
                kept.load(after, end, end)
                kept.keep_path(tree.ancestors[:, row])
                kept.rollback(mx.array([tree.levels - len(path)]))
                kept.settle(before.tokens + [tokens[i] for i in path])
                assert_equal(kept, alone)


def test_trees_of_a_pool_are_those_of_each_sequence(tiny_models, subject):
    """With free slots between the sequences; each one's cache is copied out with the path that it keeps."""
    rng = random.Random(1)
    for model, _, prompt, layout in cases(tiny_models, subject):
        slots = rng.choice([[0, 1, 2], [1, 3], [2, 6]])
        own = [read(model, prompt[: len(prompt) - 3 * i], **layout) for i in range(len(slots))]
        alone = [cache.copy() for cache in own]
        span, k = Span(slots, 8), rng.choice([3, 7])
        rows = {slot: i for i, slot in enumerate(slots)}
        pool = Pool(own[0])
        pool.regroup(span, [rows.get(slot, 0) for slot in span.slots], list(zip(slots, own, strict=True)))
        n = len(span.slots)
        parents = [random_parents(rng, k) for _ in range(n)]
        tokens = [[rng.randrange(model.vocab_size) for _ in range(k + 1)] for _ in range(n)]
        levels = max(len(path_to(each, row)) for each in parents for row in range(k + 1)) - 1
        tree = RowTree.of(mx.array(parents), levels)
        shifts = [5 * i for i in range(n)]  # as behind pictures
        for c in pool.layers:
            c.limit, c.shift = len(prompt), mx.array(shifts)
        start = pool.mark()
        hidden = hidden_of_tree(model, pool.layers, mx.array(tokens), tree)
        last = [rng.randrange(k + 1) for _ in range(n)]
        paths = [path_to(each, row) for each, row in zip(parents, last, strict=True)]
        pool.keep_path(mx.stack([tree.ancestors[i, row] for i, row in enumerate(last)]))
        pool.rollback(mx.array([tree.levels - len(path) for path in paths]))
        mark = pool.mark()
        for slot, cache in zip(slots, alone, strict=True):
            row = span.slots.index(slot)
            for c in cache.layers:
                c.shift = shifts[row]
            kept = [tokens[row][i] for i in paths[row]]
            expected, plain = plain_rows(model, cache, kept)
            assert mx.array_equal(hidden[row][mx.array(paths[row])], expected)
            copied = cache.copy()
            pool.copy_out(mark, copied, slot, row, base=cache.offset, rows=len(kept))
            copied.settle(cache.tokens + kept)
            assert_equal(copied, plain)
        pool.restore(start)
        assert pool.fresh == []
        pool.restore(mark)
        assert [bool(fresh) for fresh in pool.fresh] == [not c.is_state for c in pool.layers]
