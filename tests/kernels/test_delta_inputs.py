"""Compare delta_inputs with MLX's operations: order of sums, SiLU, norms, gates, and the rows for the next call."""

import mlx.core as mx
import numpy as np
import pytest
from gated_cases import NAN, same
from metal_cases import exact, linux_only
from stock_ops import compute_g, rms_norm, sigmoid, silu
from sweep import sampled

from mlx_mtp import emulator
from mlx_mtp.kernels import DeltaInputs, Gates, delta_inputs, delta_inputs_ref

F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32
HEADS, D, VALUES, HV = 2, 12, 40, 5  # of q and of k, values of each; channels of v, and its heads
CONTRACTION = {F16: "fast", BF16: "off", F32: "on"}


def start(P, T, dtype, taps=4, d=D, hv=HV, layer=None):
    """Return x, rows before, weight; gates, those of the layer with type `layer`; and the heads."""
    mx.random.seed(P + 10 * T)
    C = 2 * HEADS * d + VALUES
    x, before = (mx.random.normal((1, n, C)).astype(dtype) for n in (T, taps - 1 + P))
    a, b = ((mx.random.normal((1, T, hv)) * 3).astype(dtype) for _ in range(2))
    A_log, dt_bias = (mx.random.normal((hv,)).astype(layer or dtype) for _ in range(2))
    weight = mx.random.normal((C, taps, 1)).astype(dtype)
    return x, before, weight, Gates(a, b, A_log, dt_bias), {"key_heads": HEADS, "head_dim": d}


def sums(rows, weight, fused) -> mx.array:
    """Return the sums of [1, S, C] in float32, tap by tap; fused ones in 80 bits, rounded after each tap."""
    rows, weight = (np.array(x.astype(F32)) for x in (rows, weight[..., 0]))
    taps, wide = weight.shape[1], np.longdouble
    total = np.zeros((1, rows.shape[1] - taps + 1, rows.shape[2]), np.float32)
    for i in range(taps):
        x, w = rows[:, i : i + total.shape[1]], weight[:, i]
        total = (x.astype(wide) * w + total).astype(np.float32) if fused else x * w + total
    return mx.array(total)


def wanted(window, weight, gates, d, contraction) -> DeltaInputs:
    """Return the results of MLX's operations, one after the other, from its headers if available."""
    options = emulator.Options(fp_contract=contraction)
    out = silu(sums(window, weight, contraction != "off").astype(window.dtype), options)
    q, k, v = mx.split(out, [HEADS * d, 2 * HEADS * d], axis=-1)
    with emulator.emulated(options):
        q, k = (rms_norm(x.reshape(1, -1, HEADS, d), None, 1e-6 * (d**-0.5) ** 2) for x in (q, k))
    q, k = (d**-0.5) ** 2 * q, d**-0.5 * k
    g = compute_g(gates.A_log, gates.a, gates.dt_bias, options)
    return DeltaInputs(q, k, v, g, sigmoid(gates.b, options), window)


def check(P, n, T, dtype, contraction, **more):
    x, before, weight, gates, heads = start(P, T, dtype, **more)
    taps = weight.shape[1]
    before[:, n + taps - 1 :] = NAN
    with emulator.emulated(emulator.Options(fp_contract=contraction)) as launches:
        got = delta_inputs(x, before, weight, gates, **heads, accepted=mx.array([n]) if P else None)
    assert [launch.kernel for launch in launches] == ["delta_inputs"]
    window = mx.concatenate([before[:, n : n + taps - 1], x], axis=1)
    want = wanted(window, weight, gates, heads["head_dim"], contraction)
    for name, ours, mlx in zip(DeltaInputs._fields, got, want, strict=True):
        assert same(ours, mlx), name
    return launches[0]


@linux_only
@pytest.mark.parametrize(("dtype", "contraction"), sampled([(BF16, "fast")], [*CONTRACTION.items(), (F32, "fast")]))
def test_bits(dtype, contraction):
    for P, n, T in sampled(
        [(0, 0, 1), (16, 11, 16)], [(0, 0, 1), (4, 0, 3), (4, 4, 8), (7, 2, 1), (16, 11, 16), (3, 3, 9)]
    ):
        check(P, n, T, dtype, contraction)
    check(3, 1, 2, dtype, contraction, taps=3, hv=40)


@linux_only
@pytest.mark.parametrize(("dtype", "layer", "d"), sampled([(BF16, F32, 196)], [(BF16, F32, 128), (F32, F16, 196)]))
def test_wide_heads_and_types_that_differ(dtype, layer, d):
    """A checkpoint may store A_log and dt_bias in another type."""
    check(2, 1, 2, dtype, CONTRACTION[dtype], d=d, layer=layer)


@linux_only
def test_memory():
    """Every new value is written once, and a row's taps are requested next to its rows."""
    traffic, C = check(3, 2, 4, BF16, "off"), 2 * HEADS * D + VALUES
    assert traffic["rows"].bytes_written == 2 * (3 + 4) * C
    assert sum(traffic[name].bytes_written for name in "qkv") == 2 * 4 * C
    assert (traffic["g"].bytes_written, traffic["beta"].bytes_written) == (4 * 4 * HV, 2 * 4 * HV)
    assert traffic["before"].distinct_read == 2 * 3 * C
    assert [traffic[name].reread for name in "ab"] == [1.0, 1.0]


@linux_only
@pytest.mark.parametrize("dtype", sampled([F16, F32], [F16, BF16, F32]))
def test_extremes(dtype):
    """SiLU, softplus and sigmoid of large values, infinities and NaN equal MLX's."""
    _, before, weight, gates, heads = start(0, 1, dtype, hv=40)
    C, options = weight.shape[0], emulator.Options(fp_contract=CONTRACTION[dtype], order=3)
    special = mx.array([float("inf"), -float("inf"), NAN, 0.0, -0.0, 3e-8, -1e4, 6e4])
    a = mx.concatenate([mx.linspace(-120, 120, 32), special]).reshape(1, 1, 40).astype(dtype)
    x = mx.array(np.linspace(-120, 120, C)[None, None]).astype(dtype)
    weight[:, 3] = 1
    gates = Gates(a, a, gates.A_log, mx.zeros_like(gates.dt_bias))
    with emulator.emulated(options):
        got = delta_inputs(x, mx.zeros_like(before), weight, gates, **heads)
    assert same(got.v, silu(x, options)[..., -VALUES:])
    for ours, mlx in ((got.g, compute_g(gates.A_log, a, gates.dt_bias, options)), (got.beta, sigmoid(a, options))):
        assert mx.array_equal(mx.isnan(ours), mx.isnan(mlx))
        assert same(mx.where(mx.isnan(ours), 0, ours), mx.where(mx.isnan(mlx), 0, mlx))
    assert mx.isnan(got.g).sum() == mx.isnan(got.beta).sum() == 1


@linux_only
@pytest.mark.parametrize("dtype", sampled([F16], [F16, F32]))
def test_rows_are_those_of_single_launches(dtype):
    """Run a verify of 6 rows, then its first four one at a time, each after the rows of the launch before."""
    x, before, weight, gates, heads = start(0, 6, dtype)
    a, b, *layer = gates
    with emulator.emulated(emulator.Options(fp_contract=CONTRACTION[dtype])):
        many = delta_inputs(x, before, weight, gates, **heads)
        for t in range(4):
            row = slice(t, t + 1)
            *parts, before = delta_inputs(
                x[:, row], before[:, -3:], weight, Gates(a[:, row], b[:, row], *layer), **heads
            )
            assert all(same(one, rows[:, row]) for one, rows in zip(parts, many, strict=False))
        rest = Gates(a[:, 4:], b[:, 4:], *layer)
        again = delta_inputs(x[:, 4:], many.rows, weight, rest, **heads, accepted=mx.array([4]))
    assert all(same(a, b[:, 4:]) for a, b in zip(again[:5], many, strict=False))


@linux_only
def test_a_row_does_not_depend_on_later_rows():
    x, before, weight, gates, heads = start(0, 3, BF16)
    after = (mx.arange(3) > 0)[:, None]
    spoilt = Gates(*(mx.where(after, NAN, gate) for gate in gates[:2]), *gates[2:])
    with emulator.emulated():
        want = delta_inputs(x, before, weight, gates, **heads)
        got = delta_inputs(mx.where(after, NAN, x), before, weight, spoilt, **heads)
    assert all(same(one[:, :1], all_[:, :1]) for one, all_ in zip(got[:5], want, strict=False))


@linux_only
def test_views_are_read_without_a_copy():
    x, before, weight, gates, heads = start(4, 3, BF16)
    product = mx.concatenate([x, gates.a, gates.b], axis=-1)
    views = mx.split(product, [x.shape[2], x.shape[2] + HV], axis=-1)
    layer = (mx.repeat(gate, 2)[::2] for gate in gates[2:])
    at = mx.array([3])
    with emulator.emulated() as launches:
        want = delta_inputs(x, before, weight, gates, **heads, accepted=at)
        got = delta_inputs(
            views[0],
            mx.repeat(before, 2, axis=2)[..., ::2],
            mx.repeat(weight, 2, axis=1)[:, ::2],
            Gates(*views[1:], *layer),
            **heads,
            accepted=at,
        )
    assert len(launches) == 2
    assert all(map(same, got, want))


def regrouped(x: mx.array, *widths: int) -> mx.array:
    """Return the parts of [1, T, C] in one group per head, as a view into a wider product."""
    parts = [mx.unflatten(part, 2, (HEADS, -1)) for part in mx.split(x, list(widths), axis=-1)]
    return mx.concatenate([*parts, parts[0]], axis=-1)[..., : x.shape[2] // HEADS]


@linux_only
@pytest.mark.parametrize("fused", [True, False])
def test_heads_in_groups_are_the_heads(fused):
    """Groups that contain a key head's q, k, v and other values are read without a copy."""
    x, before, weight, gates, heads = start(2, 3, BF16, hv=2 * HEADS)
    grouped = gates._replace(a=regrouped(gates.a), b=regrouped(gates.b))
    at = mx.array([1])
    op = delta_inputs if fused else delta_inputs_ref
    with emulator.emulated() as launches:
        want = op(x, before, weight, gates, **heads, accepted=at)
        got = op(regrouped(x, HEADS * D, 2 * HEADS * D), before, weight, grouped, **heads, accepted=at)
    assert len(launches) == 2 * fused
    assert all(map(same, got, want))


@linux_only
def test_a_count_beyond_the_tape_stays_on_it():
    x, before, weight, gates, heads = start(4, 1, BF16)
    with emulator.emulated():
        for wrong, nearest in ((-3, 0), (7, 4)):
            got, want = (
                delta_inputs(x, before, weight, gates, **heads, accepted=mx.array([n])) for n in (wrong, nearest)
            )
            assert all(map(same, got, want))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_reference_is_the_formula(dtype):
    x, before, weight, gates, heads = start(4, 3, dtype)
    got = delta_inputs_ref(x, before, weight, gates, **heads, accepted=mx.array([1]))
    assert mx.array_equal(got.rows, mx.concatenate([before[:, 1:4], x], axis=1))
    window, w = exact(got.rows), exact(weight)[..., 0]
    total = sum(window[:, i : i + 3] * w[:, i] for i in range(4))
    out = total / (1 + np.exp(-total))
    q, k = (part.reshape(1, 3, HEADS, D) for part in np.split(out[..., : 2 * HEADS * D], 2, axis=-1))
    q, k = (part / np.sqrt((part * part).sum(-1, keepdims=True) + 1e-6) for part in (q, k))
    a, b, A_log, dt_bias = map(exact, gates)
    g = np.exp(-np.exp(A_log) * np.log1p(np.exp(a + dt_bias)))
    want = (q * D**-0.5, k, out[..., 2 * HEADS * D :], g, 1 / (1 + np.exp(-b)))
    for ours, formula in zip(got, want, strict=False):
        tolerance = 1e-6 if dtype == F32 else 2**-5 if ours is got.g else 2**-7
        assert np.abs(exact(ours) - formula).max() < tolerance * np.abs(formula).max()


def test_the_reference_computes_what_the_kernel_does_not_support():
    x, before, weight, gates, heads = start(0, 2, F16)
    wide = {"key_heads": 1, "head_dim": 260}
    many = mx.random.normal((1, 2, 600)), mx.random.normal((1, 3, 600)), mx.random.normal((600, 4, 1))
    for case in ((x, before, weight.astype(F32), gates, heads), (*many, gates, wide)):
        *arrays, names = case
        with emulator.emulated() as launches:
            got = delta_inputs(*arrays, **names)
        assert not launches
        assert all(map(mx.array_equal, got, delta_inputs_ref(*arrays, **names)))


def test_what_is_refused():
    x, before, weight, gates, heads = start(2, 1, F32)
    with pytest.raises(ValueError, match="before has 2 rows; it must have 3 rows or more"):
        delta_inputs(x, before[:, :2], weight, gates, **heads, accepted=mx.array([0]))
    with pytest.raises(ValueError, match="before has 5 rows; it must have 3 rows without `accepted`"):
        delta_inputs(x, before, weight, gates, **heads)
    with pytest.raises(
        ValueError, match=r"x has shape \(1, 1, 1, 88\); .* 88 channels, 96 of them q and k of 4 heads"
    ):
        delta_inputs(x, before[:, :3], weight, gates, key_heads=4, head_dim=D)
    with pytest.raises(ValueError, match=r"x has shape \(1, 1, 4, 22\); .* \[B, T, G, C/G\] for 88 channels"):
        delta_inputs(x.reshape(1, 1, 4, 22), before[:, :3], weight, gates, **heads)
