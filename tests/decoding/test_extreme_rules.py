"""Rules of extreme values on extreme logits: kernel and reference give each row what mlx-lm's processors give."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from metal_cases import linux_only
from mlx_lm.sample_utils import make_logits_processors
from sweep import SWEEP

from mlx_mtp import emulator
from mlx_mtp.decoding.logit_rules import LogitRules, changed
from mlx_mtp.kernels import Changes, Paths, Words, change_logits_ref

QUICK = emulator.Options(traffic=False)
INF, TOKENS = float("inf"), 12
VALUES = {
    "repetition_penalty": (None, 0, 1.0, 1e-30, 1.3, 1e30, 1e39, INF),
    "presence_penalty": (None, 0, 0.4, -2.0, 1e30, 1e39, INF),
    "frequency_penalty": (None, 0.35, -0.2, 1e30, -INF),
}
BIASES = (INF, -INF, 1e39, -100.0, 0.0, -0.0, 1e-40)


def of_mlx_lm():
    """Options of `make_logits_processors`."""
    sizes = {name.replace("penalty", "context_size"): st.sampled_from([0, 1, 3, 20]) for name in VALUES}
    bias = st.dictionaries(st.integers(0, 1), st.sampled_from(BIASES))
    values = {name: st.sampled_from(given) for name, given in VALUES.items()}
    return st.fixed_dictionaries({**values, **sizes, "logit_bias": bias})


def one_row(logits, path, options, excluded, kept):
    """Return logits [1, V] after a path: mlx-lm's processors, the excluded tokens, and the mask."""
    for process in make_logits_processors(**{**options, "logit_bias": options["logit_bias"] or None}):
        logits = process(mx.array(path, mx.int32), logits)
    ids = mx.arange(logits.shape[1])
    without = (ids[:, None] == mx.array([-1, *excluded])).any(axis=1)
    return mx.where(kept, mx.where(without, mx.array(mx.finfo(logits.dtype).min, logits.dtype), logits), -mx.inf)


@linux_only
@settings(max_examples=400 if SWEEP else 15)
@given(st.data())
def test_each_row_is_what_processors_give_it(data):
    n, rows, vocab = (data.draw(st.sampled_from(of)) for of in ((1, 2, 3, 5), (1, 2, 5, 16), (2, 31, 33, 127)))
    dtype, seed = data.draw(st.sampled_from([mx.float32, mx.float16, mx.bfloat16])), data.draw(st.integers(0, 999))
    rng, words, most = np.random.default_rng(seed), -(-vocab // 32) + seed % 2, min(vocab, TOKENS)
    x = np.float32(rng.normal(size=(n, rows, vocab)) * 4)
    x[rng.random(x.shape) < 0.1] = data.draw(st.sampled_from([INF, -INF, np.nan, 0.0, -0.0]))
    logits, drafts = mx.array(x).astype(dtype), rng.integers(0, most, (n, rows - 1)).astype(np.int32)
    masks = rng.integers(-(2**31), 2**31, (n, rows, words)).astype(np.int32)
    masks[rng.random((n, rows)) < 0.3] = data.draw(st.sampled_from([0, 1, -1]))  # one allows one token per word
    rules, histories, want = [], [], []
    for i in range(n):
        options, length = data.draw(of_mlx_lm()), data.draw(st.sampled_from([0, 1, 7, 40]))
        histories.append(rng.integers(0, most, length).astype(np.int32))
        banned = data.draw(st.sets(st.integers(0, vocab - 1), max_size=3) | st.just({*range(vocab)}))
        early, until = data.draw(st.sets(st.integers(0, vocab + 9), max_size=2)), length + seed % 4
        rules.append(LogitRules(**options, banned=banned, early=early, until=until))
        for r in range(rows):
            path, kept = (
                [*histories[i].tolist(), *drafts[i, :r].tolist()],
                np.unpackbits(masks[i, r].view(np.uint8), bitorder="little"),
            )
            excluded = banned | (early if len(path) < until else set())
            want.append(one_row(logits[i, r : r + 1], path, options, excluded, mx.array(kept[:vocab] == 1)))
    made = logits, rules, histories, mx.array(drafts) if rows > 1 else None, mx.array(masks)
    with emulator.emulated(QUICK):
        found = changed(*made)
    for each in (found, changed(*made, fused=False)):
        assert each.dtype == dtype
        assert mx.array_equal(each.reshape(n * rows, vocab), mx.concatenate(want), equal_nan=True).item()


def peak(longest, entries=2000, rows=16):
    """Return the bytes of memory that the reference takes for 2,000 bad words of `longest` bytes."""
    texts = mx.arange(64, dtype=mx.uint8)
    entry = np.stack(
        [np.arange(entries) * longest, np.full(entries, longest), *np.array([[0], [1]]).repeat(entries, 1)], 1
    )
    keys = mx.random.randint(0, 64, (entries * longest,), key=mx.random.key(1)).astype(mx.uint8)
    words = Words(mx.array(entry[None], mx.int32), keys, mx.arange(64), mx.arange(65, dtype=mx.int32), texts)
    changes = Changes(mx.ones((1, 3)), mx.zeros((1, 3), mx.int32), words=words)
    none, drafts = mx.zeros((1, 1), mx.int32), mx.zeros((1, rows - 1), mx.int32)
    paths = Paths(none, drafts, none[0], mx.zeros((1, longest), mx.uint8), mx.array([longest], mx.int32))
    logits = mx.zeros((1, rows, 64))
    mx.eval(logits, words, paths, changes.penalties, changes.sizes)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(change_logits_ref(logits, changes, paths))
    return mx.get_peak_memory() - before


def test_memory_does_not_grow_with_the_longest_bad_word():
    assert peak(200) < 1.2 * peak(10)


@pytest.mark.parametrize("size", [1e39, -1e39])
def test_a_bias_above_every_float_is_infinite(size):
    found = LogitRules(logit_bias={1: size})(mx.array([0]), mx.zeros((1, 3)))
    assert found.tolist() == [[0.0, INF if size > 0 else -INF, 0.0]]
