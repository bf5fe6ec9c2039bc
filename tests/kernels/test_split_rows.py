"""Check that kernels which split their rows give the same bits as those that do not."""

import itertools
from functools import partial

import mlx.core as mx
import pytest
from exact import CONTRACTIONS, DTYPES, FORMATS, draw, same_bits
from metal_cases import linux_only
from metal_texts import collected
from sweep import sampled

from mlx_mtp import emulator
from mlx_mtp.kernels import (
    Experts,
    Quantized,
    Routing,
    attention_splits,
    moe_splits,
    padded,
    splits,
    verify_attention,
    verify_glu,
    verify_head,
    verify_head_draw,
    verify_head_top,
    verify_moe,
    verify_qmm,
    verify_qmm_heads,
)

pytestmark = linux_only


def apart(w, count):
    """Split weights [count * N, K] into [count, N, K]."""
    parts = (None if a is None else a.reshape(count, -1, a.shape[-1]) for a in (w.w, w.scales, w.biases))
    return Quantized(*parts, w.group_size, w.bits, w.mode, (w.w.shape[0] // count,))


def qmm(m, dtype, of):
    return partial(verify_qmm, *draw(*of, (24, 512), m, dtype)), splits(m)


def glu(m, dtype, of):
    return partial(verify_glu, *draw(*of, (24, 512), m, dtype, (12, 24))), splits(m)


def qmm_heads(m, dtype, of):
    x, w = draw(*of, (48, 512), m, dtype)
    return partial(verify_qmm_heads, mx.stack([x, x], 1)[None], apart(w, 2), heads_first=False), splits(m)


def head(m, dtype, of):
    return partial(verify_head, *draw(*of, (160, 512), m, dtype)), splits(m)


def head_top(m, dtype, of):
    return partial(verify_head_top, *draw(*of, (160, 512), m, dtype), 20), splits(m)


def head_draw(m, dtype, of):
    x, w = draw(*of, (160, 512), m, dtype)
    return partial(verify_head_draw, x, w, mx.random.key(1), 3, 0.7), splits(m)


def moe(m, dtype, of, gated=True):
    """Route each row to two of three experts; one of them is every row's."""
    gate, up, down = (apart(draw(*of, (3 * 128, 128), i, dtype)[1], 3) for i in (1, 2, 3))
    x = mx.random.normal((m, 128), dtype, key=mx.random.key(m))
    logits = mx.random.normal((m, 3), dtype, key=mx.random.key(2)) + mx.array([9.0, 0.0, 0.0], dtype)
    run = partial(verify_moe, x, logits, Experts(gate if gated else None, up, down), Routing("sigmoid", 2))
    return run, moe_splits(m)


def attention(m, dtype, group, width, bits=None):
    q = mx.random.normal((1, group, m, width), dtype, key=mx.random.key(m))
    stored = [mx.random.normal((1, 1, 80, width), dtype, key=mx.random.key(i)) for i in (1, 2)]
    k, v = [mx.quantize(a, 32, bits) for a in stored] if bits else stored
    more = {"scale": 0.1, "limit": 50 + m, "group_size": 32, "bits": bits}
    splits_ = attention_splits(group * padded(m), width)
    return partial(verify_attention, q, k, v, mx.array([50]), **more), splits_


QUANTIZED = {
    "qmm": qmm, "glu": glu, "qmm_heads": qmm_heads, "head": head, "head_top": head_top, "head_draw": head_draw,
    "moe": moe, "moe without gate": partial(moe, gated=False),
}  # fmt: skip
ROWS = range(1, 17)
SOME = itertools.cycle([6, 11, 3, 8, 14])


def check(run, split, fp_contract):
    """Compare bits with and without `split`; another kernel runs if the rows can be split."""
    found, launched = [], []
    for each in (False, True):
        with collected() as texts:
            run(split=each)
        launched.append(texts)
        with emulator.emulated(emulator.Options(fp_contract=fp_contract, traffic=False)):
            y = run(split=each)
            mx.eval(y)
        found.append([y] if isinstance(y, mx.array) else list(y))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
    assert (launched[0] != launched[1]) == split


FEW = [*zip(QUANTIZED, SOME, strict=False)][::3]


@pytest.mark.parametrize(("op", "m"), sampled(FEW, itertools.product(QUANTIZED, ROWS)))
def test_products(op, m):
    i = list(QUANTIZED).index(op) + m
    chosen = zip([CONTRACTIONS[i % 3]], [FORMATS[5 * i % len(FORMATS)]], strict=True)
    for fp_contract, of in sampled(chosen, zip(CONTRACTIONS, FORMATS[i % 7 :: 7], strict=True)):
        run, split = QUANTIZED[op](m, DTYPES[i % 3], of)
        check(run, split, fp_contract)


WIDTHS = {64: (8, 12), 128: (8, 16), 192: (12,), 256: (6, 8), 512: (8,)}  # and heads of a KV head


@pytest.mark.parametrize(
    ("width", "group", "m"),
    sampled(
        [(128, 8, 8), (512, 8, 4)],
        [(width, group, m) for width, groups in WIDTHS.items() for group in groups for m in ROWS],
    ),
)
def test_attention(width, group, m):
    for bits in sampled([(None, 8, 4)[m % 3]], (None, 8, 4)):
        check(*attention(m, DTYPES[m % 3], group, width, bits), CONTRACTIONS[m % 3])
