"""Check draw_top: each row's token is that of a draw from the whole filtered row, with the key of its position."""

import itertools

import mlx.core as mx
import pytest
from metal_cases import linux_only
from sweep import SWEEP, sampled

from mlx_mtp import emulator
from mlx_mtp.decoding.sampling import Sampling, key_at
from mlx_mtp.kernels import draw_top, top_ref
from mlx_mtp.kernels.draw_top import draw_top_ref

FILTERS = ({}, {"top_p": 0.8}, {"min_p": 0.15}, {"top_p": 0.95, "min_p": 0.02}, {"top_p": 0.1})
KEY = mx.array([7, 2**32 - 3], mx.uint32)


def logits(rows, vocab, seed, *, ties=False):
    x = 2.5 * mx.random.normal((rows, vocab), key=mx.random.key(seed))
    return mx.round(x) if ties else x


def drawn(top, key, position, options=None, **more):
    """Run draw_top in the emulator, in one launch."""
    with emulator.emulated(options) as launches:
        tokens = draw_top(top, key, position, **more)
    assert [launch.kernel for launch in launches] == ["draw_top"]
    assert tokens.dtype == mx.int32
    return tokens.tolist()


@linux_only
@pytest.mark.parametrize("n", sampled((6, 64), (1, 2, 6, 20, 32, 33, 63, 64)))
def test_draws_are_those_of_the_reference(n):
    """For many keys, positions, temperatures and filters, and for equal logits."""
    options, found = emulator.Options(traffic=False), set()
    for seed, filters in itertools.product(range(40 if SWEEP else 4), FILTERS):
        top = top_ref(logits(1 + seed % 16, 70, seed, ties=seed % 2 == 1), n)
        key, where = mx.random.key(seed), (mx.array([2**31 - 5 + seed]), 1000 * seed)[seed % 2]
        more = {"temp": (0.3, 1.0, 2.5)[seed % 3], "vocab_size": 70, **filters}
        want = draw_top_ref(top, key, where, **{"top_p": 1.0, "min_p": 0.0, **more}).tolist()
        assert drawn(top, key, where, options, **more) == want
        found |= set(want)
    assert len(found) > min(n - 1, 8)


@linux_only
def test_a_row_is_drawn_for_alone():
    """Tokens equal those of sampling, row by row, in any order of threads."""
    top, sampling = top_ref(logits(5, 40, 3), 7), Sampling(temp=0.9, top_k=7, top_p=0.9, min_p=0.01)
    more = {**sampling.filters, "vocab_size": 40}
    many = drawn(top, KEY, 12, emulator.Options(order="reverse"), **more)
    for i in range(5):
        values, tokens, total = (part[i : i + 1] for part in top)
        assert drawn((values, tokens, total), KEY, 12 + i, **more) == many[i : i + 1]
        alone = draw_top_ref((values - total[:, None], tokens, mx.zeros(1)), key_at(KEY, 12 + i), 0, **more)
        assert alone.tolist() == many[i : i + 1]


@linux_only
def test_what_is_not_a_number_is_not_drawn():
    values, tokens, total = top_ref(logits(4, 40, 5), 4)
    clean = drawn((values, tokens, total), KEY, 0, temp=1.0, vocab_size=40)
    values[1], total[2] = -float("inf"), float("nan")
    spoilt = drawn((values, tokens, total), KEY, 0, temp=1.0, top_p=0.999, vocab_size=40)
    assert [spoilt[0], spoilt[3]] == [clean[0], clean[3]]
    assert spoilt[1:3] == [0, 0]


def test_filters_narrow_the_reference():
    top = top_ref(mx.log(mx.array([[0.4, 0.3, 0.2, 0.1]])), 4)
    for more, kept in (
        ({"top_p": 0.35, "min_p": 0.0}, {0}),
        ({"top_p": 0.65, "min_p": 0.0}, {0, 1}),
        ({"top_p": 1.0, "min_p": 0.45}, {0, 1, 2}),
    ):
        tokens = [draw_top_ref(top, KEY, i, temp=2.0, vocab_size=4, **more).item() for i in range(40)]
        assert set(tokens) == kept
    with pytest.raises(ValueError, match="temp=0: allowed is more than 0"):
        draw_top(top, KEY, 3, temp=0, vocab_size=4)
