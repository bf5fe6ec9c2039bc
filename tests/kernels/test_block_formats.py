"""Check kernels on GGUF's block formats: a row has the bits that it has alone, and weights are read once.

MLX has no kernel for these formats, so the values are compared with dequantized weights.
"""

import itertools
from dataclasses import replace
from functools import partial

import gguf
import mlx.core as mx
import numpy as np
import pytest
from exact import CONTRACTIONS, DTYPES, same_bits
from metal_cases import exact, linux_only, relative_error
from moe_blocks import visits
from sweep import SWEEP, sampled, sweep

from mlx_mtp import emulator
from mlx_mtp.kernels import (
    BLOCK_FORMATS,
    Experts,
    Quantized,
    Routing,
    dequantized_blocks,
    quantized_blocks,
    verify_glu,
    verify_glu_ref,
    verify_head,
    verify_head_top,
    verify_moe,
    verify_moe_ref,
    verify_qmm,
    verify_qmm_heads,
    verify_qmm_heads_ref,
)
from mlx_mtp.kernels._quantized import lanes

pytestmark = linux_only
F32, F16, BF16 = DTYPES
ERRORS = {F32: 1e-5, F16: 2e-3, BF16: 2e-2}
K_OF = {"iq4_nl": (32, 128, 160, 544), "iq4_xs": (256, 768), "q6_k": (256, 1024)}
GRIDS = ("forward", "reverse", 7)
NAMES = ("w", "gate", "up")  # of packed weights in kernels


def random_scales(words: mx.array, mode: str) -> mx.array:
    """Return other words of scales, with every sign and size of factors, and numbers between 1/16 and 1/8."""
    form = BLOCK_FORMATS[mode]
    records = mx.random.randint(0, 2**16, words.shape).astype(mx.uint16).reshape(*words.shape[:-1], -1, form.words)
    numbers = mx.random.uniform(0.0625, 0.125, (*records.shape[:-1], 1)) * mx.random.randint(0, 2, (1,)) * 2 - 0.1
    number = numbers.astype(mx.float16).view(mx.uint16)
    return mx.concatenate([number, records[..., 1:]], axis=-1).reshape(words.shape)


def weights_of(mode: str, *shape: int, ends: tuple[int, ...] = ()) -> Quantized:
    form = BLOCK_FORMATS[mode]
    w, words = quantized_blocks(mx.random.normal(shape), mode)
    w = mx.random.randint(0, 2**16, (*w.shape[:-1], 2 * w.shape[-1]), mx.uint16).view(mx.uint32)
    scales = random_scales(words, mode)
    return Quantized(w, scales, None, form.group_size, form.bits, mode, ends or (shape[-2],))


def draw(mode: str, n: int, k: int, m: int, dtype: mx.Dtype, ends: tuple[int, ...] = ()):
    """Return x (m, K) and weights (N, K) of random codes and scales, equal for equal arguments."""
    mx.random.seed(n + k + m)
    return mx.random.normal((m, k)).astype(dtype), weights_of(mode, n, k, ends=ends)


def emulated(call, x, *more, **options):
    with emulator.emulated(emulator.Options(**options)) as launches:
        y = call(x, *more)
    return y, launches


def alone(call, x, *more, axis=0, **options):
    """Return the outputs for each row of x on its own."""
    rows = [emulated(call, row, *more, traffic=False, **options)[0] for row in mx.split(x, x.shape[axis], axis=axis)]
    return mx.concatenate(rows, axis=axis)


def product(x, weights):
    return verify_qmm(x, weights)[0]


def assert_rows_exact(mode, k, n, m, dtype, contraction):
    x, weights = draw(mode, n, k, m, dtype)
    y, _ = emulated(product, x, weights, fp_contract=contraction)
    assert same_bits(y, alone(product, x, weights))
    true = exact(x) @ exact(dequantized_blocks(weights.w, weights.scales, mode)).T
    assert relative_error(y, true) < ERRORS[dtype]


CASES = [
    ("iq4_nl", 544, 9, 3, BF16, "fast"),
    ("iq4_xs", 768, 9, 12, F16, "on"),
    ("q6_k", 256, 6, 7, F32, "off"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: "-".join(str(v).rpartition(".")[2] for v in c))
def test_rows_have_the_bits_of_one_row(case):
    """In every contraction: the sums are explicit fused multiply-adds."""
    assert_rows_exact(*case)


def test_one_order_of_sums_for_all_widths():
    """One text serves all widths, so that what the compile check compiles is what a model launches."""
    shapes = {"iq4_nl": (32, 64, 128, 4096), "iq4_xs": (256, 4096), "q6_k": (256, 4096)}
    assert {lanes(weights_of(mode, 8, k)) for mode, widths in shapes.items() for k in widths} == {(16, 32)}


@sweep
@pytest.mark.parametrize("mode", BLOCK_FORMATS)
def test_sweep(mode):
    for dtype, contraction, m in itertools.product(DTYPES, CONTRACTIONS, range(1, 17)):
        for k in K_OF[mode]:
            assert_rows_exact(mode, k, 1 + 5 * m % 23, m, dtype, contraction)


@pytest.mark.parametrize("mode", sampled(["q6_k"], BLOCK_FORMATS))
def test_weights_are_requested_once_for_twelve_rows(mode):
    chosen = sampled((12, 13), range(1, 17))
    requested = {}
    for m in chosen:
        _, (traffic,) = emulated(product, *draw(mode, 64, 512, m, F32))
        requested[m] = traffic["w"].reread
    assert requested == {m: 1.0 if m < 13 else 2.0 for m in chosen}


@pytest.mark.parametrize("order", sampled(["reverse"], GRIDS))
@pytest.mark.parametrize("mode", sampled(["q6_k"], BLOCK_FORMATS))
def test_in_any_order_of_threads(mode, order):
    x, weights = draw(mode, 13, 512, 3, F16)
    y, _ = emulated(product, x, weights, order=order)
    assert same_bits(y, emulated(product, x, weights)[0])


@pytest.mark.parametrize("mode", sampled(["iq4_xs"], BLOCK_FORMATS))
def test_nan_in_a_row_leaves_the_others(mode):
    x, weights = draw(mode, 8, 256, 4, F32)
    clean = emulated(product, x, weights)[0]
    for value in (float("nan"), float("inf")):
        y, _ = emulated(product, mx.where(mx.arange(4)[:, None] == 2, value, x), weights)
        kept = mx.array([0, 1, 3])
        assert same_bits(y[kept], clean[kept])
        assert not mx.isfinite(y[2]).any()


@pytest.mark.parametrize("mode", sampled(["iq4_xs"], BLOCK_FORMATS))
def test_slices_that_begin_inside_a_larger_array(mode):
    """Rows of x, weights and scales from an odd offset on."""
    x, weights = draw(mode, 12, 256, 6, BF16)
    part = Quantized(weights.w[3:], weights.scales[3:], None, *list(vars(weights).values())[3:6], (9,))
    y, _ = emulated(product, x[1:], part)
    assert same_bits(y, emulated(product, x, weights)[0][1:, 3:])


@pytest.mark.parametrize("mode", sampled(["q6_k"], BLOCK_FORMATS))
def test_per_head_products(mode):
    mx.random.seed(0)
    x, weights = mx.random.normal((1, 3, 2, 264)).astype(F16), weights_of(mode, 2, 9, 256)
    call = partial(verify_qmm_heads, weights=weights, heads_first=False)
    y, (traffic,) = emulated(call, x)
    assert same_bits(y, alone(call, x, axis=1))
    assert relative_error(y, exact(verify_qmm_heads_ref(x.astype(F32), weights, heads_first=False))) < ERRORS[F16]
    assert traffic["w"].reread == pytest.approx(12 / 9)  # the last tile has one row of four


@pytest.mark.parametrize("mode", sampled(["iq4_xs"], BLOCK_FORMATS))
def test_gate_and_up(mode):
    x, weights = draw(mode, 16, 256, 5, F32, ends=(8, 16))
    y, (traffic,) = emulated(verify_glu, x, weights)
    assert same_bits(y, alone(verify_glu, x, weights))
    assert relative_error(y, exact(verify_glu_ref(x, weights))) < ERRORS[F32]
    assert traffic["w"].reread == 1.0


@pytest.mark.parametrize("mode", sampled(["iq4_nl"], BLOCK_FORMATS))
def test_choice_of_tokens(mode):
    x, weights = draw(mode, 150, 256, 3, BF16)
    logits, _ = emulated(product, x, weights)
    tokens, launches = emulated(verify_head, x, weights)
    assert np.array_equal(tokens, mx.argmax(logits, axis=-1))
    assert launches[0]["w"].reread == pytest.approx(152 / 150)
    if not SWEEP:
        return
    values = emulated(partial(verify_head_top, n=3), x, weights)[0][0]
    assert np.array_equal(values, -mx.sort(-logits.astype(F32), axis=-1)[:, :3])


@pytest.mark.parametrize("modes", sampled([("iq4_xs", "q6_k")], itertools.product(BLOCK_FORMATS, repeat=2)))
@pytest.mark.parametrize("gated", sampled([True], [True, False]))
def test_experts(modes, gated):
    """Each visited expert is read once; a row alone has the same bits."""
    mx.random.seed(1)
    gate, up = (weights_of(modes[0], 6, 256, 256) for _ in range(2))
    experts = Experts(gate if gated else None, up, weights_of(modes[1], 6, 256, 256))
    x, rows = mx.random.normal((4, 256)) / 64, [[0, 3], [3, 5], [3, 1], [5, 0]]
    call = partial(verify_moe, experts=experts, routing=Routing("sigmoid", 2))
    y, launches = emulated(call, x, visits(rows, 6))
    one = [emulated(call, x[i : i + 1], visits([row], 6), traffic=False)[0] for i, row in enumerate(rows)]
    assert same_bits(y, mx.concatenate(one))
    assert relative_error(y, exact(verify_moe_ref(x, visits(rows, 6), experts, Routing("sigmoid", 2)))) < ERRORS[F32]
    names = {name: launch for launch in launches for name in launch.buffers}
    assert all(names[name][name].reread == 1.0 for name in ("w", "up") if name in names)


def per_head(x, weights):
    return verify_qmm_heads(x, weights, heads_first=False)


def best(x, weights):
    return verify_head_top(x, weights, 3)[0]


def mixture(x, *weights):
    """Return the experts' sum for rows and their router logits, concatenated."""
    return verify_moe(x[:, :256], x[:, 256:], Experts(*weights), Routing("sigmoid", 2))


# By op: a call with x and weights, the shapes of the weights, and the axis of rows.
RELATIVES = {
    "verify_qmm": (product, [(32, 256)], 0),
    "verify_glu": (verify_glu, [(16, 256)], 0),
    "verify_qmm_heads": (per_head, [(2, 16, 256)], 1),
    "verify_head": (best, [(256, 256)], 0),
    "verify_moe": (mixture, [(6, 256, 256)] * 3, 0),
}


def rows_for(op: str, m: int, dtype: mx.Dtype) -> mx.array:
    if op == "verify_qmm_heads":
        return mx.random.normal((1, m, 2, 256)).astype(dtype)
    x = mx.random.normal((m, 256)).astype(dtype)
    if op != "verify_moe":
        return x
    chosen = visits([[i % 6, (i + 1 + i % 4) % 6] for i in range(m)], 6)
    return mx.concatenate([x / 64, chosen.astype(dtype)], axis=-1)


def shifted(a: mx.array) -> mx.array:
    """Return an equal array that begins one element into its buffer."""
    flat = a.reshape(-1)
    return mx.concatenate([flat[-1:], flat])[1:].reshape(a.shape)


@pytest.mark.parametrize("m", sampled([5], [5, 12]))
@pytest.mark.parametrize(("dtype", "contraction"), sampled([(F16, "on")], zip(DTYPES, CONTRACTIONS, strict=True)))
@pytest.mark.parametrize(
    ("op", "mode"),
    sampled([("verify_glu", "q6_k")], itertools.product(RELATIVES, BLOCK_FORMATS)),
)
def test_relatives(op, mode, dtype, contraction, m):
    """Of all relatives: traffic, a row alone, threads in any order, slices, and NaN in a row."""
    call, shapes, axis = RELATIVES[op]
    mx.random.seed(m)
    ends = (8, 16) if op == "verify_glu" else ()
    x, weights = rows_for(op, m, dtype), [weights_of(mode, *shape, ends=ends) for shape in shapes]
    run = partial(emulated, call, fp_contract=contraction)
    y, launches = run(x, *weights)
    buffers = {name: launch[name].reread for launch in launches for name in launch.buffers if name in NAMES}
    assert set(buffers.values()) == {1.0}
    assert same_bits(y, alone(call, x, *weights, axis=axis, fp_contract=contraction))
    for order in GRIDS[1:]:
        assert same_bits(y, run(x, *weights, order=order, traffic=False)[0])
    inside = [replace(each, w=shifted(each.w), scales=shifted(each.scales)) for each in weights]
    assert same_bits(y, run(shifted(x), *inside, traffic=False)[0])
    others = mx.moveaxis(x, axis, 0)
    others[1, ..., :200] = float("nan")
    clean, found = (
        mx.moveaxis(a, axis, 0) for a in (y, run(mx.moveaxis(others, 0, axis), *weights, traffic=False)[0])
    )
    kept = mx.array([i for i in range(m) if i != 1])
    assert same_bits(found[kept], clean[kept])
    assert not mx.isfinite(found[1]).any()


@pytest.mark.parametrize("mode", BLOCK_FORMATS)
def test_every_code_and_factor_is_the_reference(mode):
    """A weight is read out by an x of one 1, in each row's first and last groups."""
    mx.random.seed(2)
    weights, every = weights_of(mode, 16, 256), slice(5, None, 21)
    y, _ = emulated(product, mx.eye(256)[every], weights)
    assert same_bits(y, dequantized_blocks(weights.w, weights.scales, mode)[:, every].T)
    if BLOCK_FORMATS[mode].bits == 4:
        codes = Quantized(
            mx.array([[0x76543210, 0xFEDCBA98] * 2], mx.uint32),
            mx.array([[0x3C00]], mx.uint16),
            None,
            32,
            4,
            "iq4_nl",
            (1,),
        )
        table = emulated(product, mx.eye(32)[:16], codes)[0]
        assert tuple(table[:, 0].tolist()) == gguf.quants.IQ4_NL.kvalues
