"""Check choose_rows against sorted integer masses, mlx-lm's filters, and the choices of verify_head."""

import ctypes
import itertools
import math
import random
from dataclasses import replace
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from draws import draw
from hypothesis import given, settings
from hypothesis import strategies as st
from metal_cases import linux_only
from sweep import SWEEP, sweep

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
random.Random(1).shuffle(EVERY)  # so that options differ between the sequences of a batch


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
        if o.top_p > 0 and np.float32(o.top_p) < 1:
            part = int(np.rint(np.float32(o.top_p) * np.float32(2**24)))
            limit = max((sum(self.mass[i] for i in left) >> 8) * part >> 16, 1)
            kept, above = [], 0
            for _, equal in itertools.groupby(left, key=lambda i: row[i]):
                kept += [*equal] if above < limit else []
                above = sum(self.mass[i] for i in kept) if above < limit else above
            left = kept
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
    inverse = np.float32(max(1.0 / options.temp, 2.0**-126))
    with np.errstate(over="ignore"):
        scores[left] = oracle.row[left] * inverse + noise[left]
    if left and abs(scores.max()) > 2**20 and np.isfinite(greatest := oracle.row[left].max()):
        scores[left] = (oracle.row[left] - greatest) * inverse + noise[left]
    return int(scores.argmax())


def run(logits, samplings, key, position, options=QUICK):
    """Run choose_rows in the emulator, in one launch."""
    with emulator.emulated(options) as launches:
        tokens = choose_rows(logits, samplings, key, position)
    assert [launch.kernel for launch in launches] == ["choose_rows"]
    assert (tokens.dtype, tokens.shape) == (mx.int32, logits.shape[:2])
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


MIXED = [
    Sampling(temp=0.7, top_p=0.9, xtc_probability=1.0, xtc_threshold=0.0, xtc_special_tokens=(0, 3)),
    Sampling(temp=1.3, min_p=0.9, min_tokens_to_keep=40),
    Sampling(),
    Sampling(temp=1.0, top_k=50),
    Sampling(temp=2.0),
    Sampling(temp=1.0, top_p=0.999),
    Sampling(temp=1.0, top_p=1e-9),
    Sampling(temp=0.8, top_p=0.95, min_p=0.05, top_k=20, xtc_probability=0.4, xtc_threshold=0.1),
]


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


SIZES = (1, F32, 1), (16, BF16, 31), (5, F16, 70), (1, BF16, 5003), (1, F32, 1024), (2, F32, 33)


@linux_only
@pytest.mark.parametrize(("rows", "dtype", "vocab_size"), SIZES)
def test_rows_types_and_vocabularies(rows, dtype, vocab_size):
    """With options that differ between the sequences; more tokens than threads have, and fewer than top_k."""
    chosen = [replace(o, top_k=o.top_k % vocab_size, xtc_special_tokens=()) for o in MIXED]
    for seed, scale in ((vocab_size, 2.5), *[(i, 2.0**i) for i in range(-6, 12 if SWEEP else -6)]):
        check(rows_of(len(chosen), rows, vocab_size, seed, dtype, scale=scale), chosen, seed)


@linux_only
@pytest.mark.parametrize("order", ["reverse", 5])
def test_the_order_of_threads_does_not_matter(order):
    check(rows_of(len(MIXED), 1, 300, 8, BF16, ties=order == 5), MIXED, 8, replace(QUICK, order=order))


def threshold_at(logit: float) -> float:
    """Return an XTC threshold that is the float32 probability of the second of the logits 0 and `logit`."""
    chance, whole = np.float32(expf(logit)), np.float32(1 + np.float32(expf(logit)))
    near = np.float32(chance / whole)
    steps = (near, np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(1)))
    return float(next(t for t in steps if t * whole == chance))


BOUNDARIES = {
    "top-k among equal logits": ([0, 1, 1, 2, 1, 1], {"top_k": 3}, {1, 2, 3}),
    "the last of equal logits": ([1, 1, 1, 1], {"top_k": 3}, {0, 1, 2}),
    "zeros of both signs": ([-0.0, 0.0, -1, -0.0], {"top_k": 1}, {0}),
    "top-p keeps equal logits": ([3, 1, 2, 2, 1], {"top_p": 0.6}, {0, 2, 3}),
    "min-p between positive logits": ([2, 1, 1.5], {"min_p": math.exp(-0.999)}, {0, 2}),
    "min-p between negative logits": ([-1, -2, -1.5], {"min_p": math.exp(-0.999)}, {0, 2}),
    "min-p keeps a logit at its bound": ([2, 1, 1.5], {"min_p": 1.0, "min_tokens_to_keep": 2}, {0, 2}),
    "min-p keeps the first of equal ones": ([0, 2, 0, 0], {"min_p": 1.0, "min_tokens_to_keep": 3}, {0, 1, 2}),
    "XTC keeps the least above": ([2, 1, 1, -3], {"xtc_threshold": 0.1}, {1, 2, 3}),
    "XTC keeps special tokens": ([2, 2, 1, -3], {"xtc_threshold": 0.1, "xtc_special_tokens": (1,)}, {1, 2, 3}),
    "XTC's threshold itself": ([0, -1.25], {"xtc_threshold": threshold_at(-1.25)}, {0, 1}),
    "XTC's threshold 0": ([0, -1, -2, -2], {"xtc_threshold": 0.0}, {2, 3}),
    "XTC of what top-p left": ([2, 1.5, 0, 0], {"xtc_threshold": 0.35, "top_p": 0.7}, {1}),
    "top-k of what XTC left": ([2, 1, 0, -1], {"xtc_threshold": 0.2, "top_k": 2}, {1, 2}),
    "no bound by maxima that XTC removed": (
        [0, 1, 0] + [0] * 1027 + [3],  # thread 6's greatest is token 1030
        {"xtc_threshold": 0.001, "xtc_special_tokens": (6,), "top_k": 1},
        {1},
    ),
}


@linux_only
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_exactly_these_tokens_remain(dtype):
    """At a high temperature every token that remains is drawn in one of 32 rows."""
    for name, (logits, filters, left) in BOUNDARIES.items():
        options = Sampling(temp=1000.0, **{"xtc_probability": float("xtc_threshold" in filters)}, **filters)
        rows = 32 if len(left) > 1 else 2  # of four logits MLX passes one row in constant memory
        found = check(mx.broadcast_to(mx.array(logits, dtype), (1, rows, len(logits))), [options], 1)
        assert set(found[0]) == left, name


@linux_only
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_values_of_all_sizes(dtype):
    """Logits of both signs and every exponent, zeros of both signs, and long runs of equal ones."""
    x = np.random.default_rng(1).normal(size=(len(MIXED), 2, 1100)).astype(np.float32)
    x[:, 0] *= np.exp2(np.random.default_rng(2).integers(-100, 4, x[:, 0].shape)).astype(np.float32)
    x[:, 1] = np.where(np.arange(1100) % 3 == 0, 0.0, -0.0)
    x[:, 1, ::100] = 1.0
    check(mx.array(x).astype(dtype), MIXED, 3)


@linux_only
def test_infinities_and_nan():
    """A NaN and a removed token are never chosen; where nothing else is left the token is 0."""
    inf, nan = math.inf, math.nan
    few, many = [nan, -inf, 1, nan, 0, -inf], [1, inf, 0, inf, nan, 2]
    rows = mx.array([[-inf] * 6, [nan] * 6, few, many, [-1e38, -inf, 1e38, 0, 1, 2]])
    chosen = [replace(o, top_k=min(o.top_k, 5), min_tokens_to_keep=min(o.min_tokens_to_keep, 5)) for o in MIXED]
    want = check(mx.broadcast_to(rows, (len(chosen), *rows.shape)), chosen, 4)
    assert {token for found in want for token in found[:2]} == {0}
    assert {token for found in want for token in found[2:4]} <= {1, 2, 3, 4}


LEAST = float(np.finfo(np.float32).min)
KINDS = {  # from normal values and uniform ones below 1, the row's logits
    "normal": lambda x, u: x,
    "all equal": lambda x, u: np.full_like(x, x[0]),
    "nothing": lambda x, u: np.full_like(x, -np.inf),
    "half NaN": lambda x, u: np.where(u < 0.5, np.nan, x),
    "one": lambda x, u: np.where(u == u.max(), x, -np.inf),
    "few": lambda x, u: np.where(u < 0.3, x, -np.inf),
    "infinite": lambda x, u: np.where(u < 0.2, np.inf, x),
    "excluded": lambda x, u: np.where(u < 0.5, LEAST, -np.inf),
    "huge": lambda x, u: x * np.float32(1e37),
    "subnormal": lambda x, u: x * np.float32(1e-42),
}


def extreme(vocab_size):
    """Options at and near the ends of their ranges, all of them valid."""
    tokens = st.integers(1, vocab_size)
    return st.builds(
        Sampling,
        temp=st.sampled_from([0.0, 1e-30, 1e-4, 0.7, 1.0, 50.0, 1e30, 1e300]),
        top_p=st.sampled_from([0.0, 1e-300, 1e-12, 0.3, 0.9, 1 - 1e-9, 1.0]),
        min_p=st.sampled_from([0.0, 1e-300, 0.05, 1.0]),
        top_k=st.just(0) | tokens.map(lambda k: k - 1),
        min_tokens_to_keep=st.just(1) | tokens | st.just(vocab_size),
        xtc_probability=st.sampled_from([0.0, 1e-30, 0.5, 1.0]),
        xtc_threshold=st.sampled_from([0.0, 1e-30, 0.1, 0.4999]),
        xtc_special_tokens=st.sampled_from([(), (0,), tuple(range(vocab_size))]),
    )


@linux_only
@settings(max_examples=600 if SWEEP else 20)
@given(st.data())
def test_extreme_options_of_extreme_logits(data):
    n, vocab_size = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 2, 7, 31, 33, 127]))
    rows = data.draw(st.sampled_from([-(-8 // vocab_size), 8, 9, 16]))
    kinds = data.draw(st.lists(st.sampled_from([*KINDS]), min_size=n * rows, max_size=n * rows))
    seed, dtype = data.draw(st.integers(0, 2**31)), data.draw(st.sampled_from([F32, F16, BF16]))
    rng = np.random.default_rng(seed)
    logits = [
        KINDS[kind](*rng.normal(size=(1, vocab_size)).astype(np.float32), rng.random(vocab_size)) for kind in kinds
    ]
    x = mx.array(np.array(logits, np.float32).reshape(n, rows, vocab_size)).astype(dtype)
    check(x, data.draw(st.lists(extreme(vocab_size), min_size=n, max_size=n)), seed % 99)


@linux_only
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_of_excluded_tokens_that_alone_are_allowed_each_is_drawn(dtype):
    """At any temperature, in the kernel and in the reference; a forbidden token never is."""
    least, allowed = mx.finfo(dtype).min, [3, 8, 33]
    row = mx.where(mx.array([i in allowed for i in range(40)]), least, -math.inf).astype(dtype)
    logits, (key, position) = mx.broadcast_to(row, (4, 16, 40)), at(5, 4)
    chosen = [Sampling(temp=temp) for temp in (0.01, 0.8, 1.0, 1e300)]
    chosen[1] = replace(chosen[1], top_p=0.9, min_p=0.1)
    found = run(logits, chosen, key, position)
    assert [set(tokens) for tokens in found] == [set(allowed)] * 4
    assert choose_rows_ref(logits, chosen, key, position).tolist() == found


@linux_only
def test_special_tokens_without_xtc_have_no_effect():
    plain, odd = (Sampling(temp=1.0, top_k=5, xtc_special_tokens=tokens) for tokens in ((), (2**40, -(2**40))))
    logits, (key, position) = rows_of(1, 4, 40, 3), at(3, 1)
    assert run(logits, [odd], key, position) == run(logits, [plain], key, position)


def without_ties(n, rows, vocab_size, seed):
    """Return logits no two of which are close, so that every cut is at the same token however it is computed."""
    order = mx.argsort(mx.random.uniform(shape=(n, rows, vocab_size), key=mx.random.key(seed)), axis=-1)
    return order.astype(F32) * 0.11 + 0.013


@linux_only
def test_a_seed_gives_the_tokens_of_each_row_alone():
    """The kernel, the reference and a loop over rows of mlx-lm's filters agree."""
    for start in range(0, 24, 1 if SWEEP else 6):
        chosen = EVERY[start::24]
        logits, (key, position) = without_ties(len(chosen), 2, 45, start), at(start, len(chosen))
        many = choose_rows_ref(logits, chosen, key, position)
        alone = [
            [
                draw(o, row - mx.logsumexp(row), key_at(key[s], position[s : s + 1] + r)).item()
                for r in range(2)
                for row in (logits[s, r : r + 1],)
            ]
            for s, o in enumerate(chosen)
        ]
        assert many.tolist() == alone == run(logits, chosen, key, position)


@linux_only
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_without_filters_tokens_are_those_of_the_head(dtype):
    """A head of weights that are the logits: row i of x selects logits i."""
    logits = rows_of(1, 3, 130, 6, dtype, ties=True)
    key, position = mx.array([[7, 2**32 - 3]], mx.uint32), mx.array([2**31 - 2], mx.int32)
    weights = mx.concatenate([logits[0].T, mx.zeros((130, 61), dtype)], axis=1)
    x = mx.eye(3, 64, dtype=dtype)
    with emulator.emulated(QUICK):
        drawn = verify_head_draw(x, weights, key[0], position, 0.8)
        greedy = verify_head(x, weights)
    assert run(logits, [Sampling(temp=0.8)], key, position) == [drawn.tolist()]
    assert run(logits, [Sampling()], key, position) == [greedy.tolist()]


@sweep
@linux_only
def test_vocabularies_above_2_to_the_18():
    check(rows_of(2, 1, 300_000, 2, F16), [MIXED[5], MIXED[7]], 2)
