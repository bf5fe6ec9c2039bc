"""Check choose_rows against sorted integer masses, against mlx-lm's filters, and against verify_head's own choices."""

import ctypes
import itertools
import math
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from metal_cases import linux_only
from sweep import SWEEP

from mlx_mtp import emulator
from mlx_mtp.decoding.sampling import Sampling, key_at
from mlx_mtp.kernels import choose_rows, choose_rows_ref, verify_head, verify_head_draw

QUICK = emulator.Options(traffic=False)
F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16
FILTERS = (
    {"top_p": (1.0, 0.8, 0.999, 0.01)},
    {"min_p": (0.0, 0.1)},
    {"min_tokens_to_keep": (1, 6)},
    {"xtc_probability": (0.0, 0.5), "xtc_threshold": (0.03,), "xtc_special_tokens": ((), (2, 5, 11))},
    {"top_k": (0, 1, 9)},
)
NAMES = [name for group in FILTERS for name in group]
EVERY = [
    Sampling(temp=0.9, **dict(zip(NAMES, values, strict=True)))
    for values in itertools.product(*(of for group in FILTERS for of in group.values()))
]


@cache
def expf(x: float) -> float:
    """Return the C library's exp in float32, which the emulator's kernels call."""
    function = ctypes.CDLL(None).expf
    function.argtypes, function.restype = [ctypes.c_float], ctypes.c_float
    return function(x)


def chances_of(row: np.ndarray) -> np.ndarray:
    top = row.max()
    return np.array([1.0 if x == top else expf(float(np.float32(x - top))) for x in row], np.float32)


class Oracle:
    """The filters of one row of float32 logits, on its tokens in sorted order; masses are Python's integers."""

    def __init__(self, row: np.ndarray):
        row = np.where(np.isnan(row), -np.inf, row)
        self.row = row
        self.left = [int(i) for i in np.lexsort((np.arange(len(row)), -row)) if row[i] > -np.inf]
        if self.left:
            chances = self.chances = chances_of(row)
            low_bits = min(14, 32 - (len(row) - 1).bit_length())
            self.scale = 2.0 ** (30 + low_bits - math.frexp(float(chances.astype(np.float64).sum()))[1] + 1)
            self.mass = [int(float(chance) * self.scale) for chance in chances]

    def filter(self, o: Sampling, coin: float) -> list[int]:
        """Return the tokens that remain."""
        row, left = self.row, self.left
        if not left:
            return []
        if 0 < o.top_p < 1:
            part = int(np.rint(np.float32(o.top_p) * np.float32(2**24)))
            limit = max((sum(self.mass[i] for i in left) >> 8) * part >> 16, 1)
            left = [i for i in left if sum(self.mass[j] for j in left if row[j] > row[i]) < limit]
        if o.min_p > 0:
            lowest = np.float32(row[left[0]] + np.float32(math.log(o.min_p)))
            keep = o.min_tokens_to_keep if o.min_tokens_to_keep > 1 else 0
            left = [i for place, i in enumerate(left) if row[i] >= lowest or place < keep]
        if o.xtc_probability > 0 and np.float32(coin) < np.float32(o.xtc_probability):
            part = np.float32(np.float32(sum(self.mass[i] for i in left)) / np.float32(self.scale))
            above = [row[i] for i in left if self.chances[i] > np.float32(o.xtc_threshold) * part]
            least = min(above, default=np.inf)
            left = [i for i in left if row[i] <= least or i in o.xtc_special_tokens]
        return left[: o.top_k] if o.top_k else left


def draws(key: mx.array, position: int, vocab_size: int) -> tuple[float, np.ndarray]:
    coin, dice = mx.random.split(key_at(key, position))
    return mx.random.uniform(key=coin).item(), np.array(mx.random.gumbel((vocab_size,), key=dice))


def expected(row: np.ndarray, options: Sampling, key: mx.array, position: int, oracle: Oracle | None = None) -> int:
    oracle = oracle or Oracle(row)
    if options.greedy:
        return oracle.left[0] if oracle.left else 0
    coin, noise = draws(key, position, len(row))
    left = oracle.filter(options, coin)
    scores = np.full(len(row), -np.inf, np.float32)
    scores[left] = oracle.row[left] * np.float32(1.0 / options.temp) + noise[left]
    return int(scores.argmax())


def run(logits, samplings, key, position, options=QUICK):
    """Run choose_rows in the emulator, in one launch."""
    with emulator.emulated(options) as launches:
        tokens = choose_rows(logits, samplings, key, position)
    assert [launch.kernel for launch in launches] == ["choose_rows"]
    assert tokens.dtype == mx.int32 and tokens.shape == logits.shape[:2]
    return tokens.tolist()


def rows_of(n, rows, vocab_size, seed, dtype=F32, *, ties=False, scale=2.5):
    x = scale * mx.random.normal((n, rows, vocab_size), key=mx.random.key(seed))
    return (mx.round(x) if ties else x).astype(dtype)


def at(seed, n):
    """Return n keys and positions; the first rows' are near 2^31."""
    keys = mx.random.split(mx.random.key(seed), n)
    return keys, mx.array([2**31 - 2 + 7 * i for i in range(n)], mx.uint32)


def check(logits, samplings, seed, options=QUICK):
    key, position = at(seed, len(samplings))
    rows, first = np.array(logits.astype(F32)), position.tolist()
    want = [
        [expected(row, o, key[s], (first[s] + r) % 2**32) for r, row in enumerate(rows[s])]
        for s, o in enumerate(samplings)
    ]
    assert run(logits, samplings, key, position, options) == want
    return want


@linux_only
@pytest.mark.parametrize("seed", range(12 if SWEEP else 1))
def test_tokens_are_those_of_sorted_masses(seed):
    """For all combinations of options, as sequences of one batch, and for equal logits."""
    found = set()
    for start in range(24):
        chosen, ties = EVERY[start::24], (start + seed) % 3 == 0
        for row in check(rows_of(len(chosen), 1, 45, 100 * seed + start, ties=ties), chosen, start):
            found |= set(row)
    assert len(found) > 12
