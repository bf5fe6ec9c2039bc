"""Compare add_norm and norm_rope with MLX's formulas, in the order of its sums, row by row."""

from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from exact import same_bits
from metal_cases import exact, linux_only
from mlx_lm.models import rope_utils

from mlx_mtp import emulator
from mlx_mtp.kernels import RopeArguments, add_norm, add_norm_ref, norm_rope, norm_rope_ref

F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32
EPS = 1e-5


def normal(*shape, dtype, seed=0, scale=1.0):
    return (mx.random.normal(shape, key=mx.random.key(seed)) * scale).astype(dtype)


def spoilt(x: mx.array, row: int) -> mx.array:
    """Return x [1, M, ...] with NaN and infinities in all rows but one."""
    other = (mx.arange(x.shape[1]) != row).reshape(1, -1, *[1] * (x.ndim - 2))
    waste = mx.array([float("nan"), float("inf"), float("-inf")], x.dtype)[mx.arange(x.shape[-1]) % 3]
    return mx.where(other, waste, x)


def no_worse(got: mx.array, stock: mx.array, want: np.ndarray) -> bool:
    """Return whether the largest error is at most twice that of MLX's own ops, or almost 0 in float32."""
    ours, theirs = (np.abs(exact(each) - want).max() for each in (got, stock))
    return ours <= 2 * theirs + 2e-7 * np.abs(want).max()


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def normed_in_order(x: mx.array, weight: mx.array, eps: float, threads: int) -> mx.array:
    """Return the norm of [..., H] in float32, unfused: a thread's fours, then lanes as a tree, then simdgroups."""
    values, H = np.array(x.astype(F32)), x.shape[-1]
    padded = np.zeros((*values.shape[:-1], -(-H // (4 * threads)) * 4 * threads), np.float32)
    padded[..., :H] = values * values
    fours = padded.reshape(*values.shape[:-1], -1, threads, 4)
    sums = np.zeros((*values.shape[:-1], threads), np.float32)
    for chunk in range(fours.shape[-3]):
        for i in range(4):
            sums = sums + fours[..., chunk, :, i]
    groups = np.zeros((*values.shape[:-1], 32), np.float32)
    groups[..., : threads // 32] = tree(sums.reshape(*values.shape[:-1], -1, 32))
    inverse = (1 / np.sqrt(tree(groups) / np.float32(H) + np.float32(eps))).astype(np.float32)
    out = mx.result_type(x, weight)
    return mx.array(values * inverse[..., None]).astype(out) * weight.astype(out)


def tree(lanes: np.ndarray) -> np.ndarray:
    for apart in (1, 2, 4, 8, 16):
        lanes = lanes + lanes[..., np.arange(32) ^ apart]
    return lanes[..., 0]


@linux_only
@pytest.mark.parametrize(
    ("H", "M", "dtype", "weights", "threads"),
    [
        (100, 5, BF16, BF16, 32),
        (64, 2, F16, F32, 32),
        (515, 3, BF16, BF16, 160),
        (4101, 2, F32, F32, 1024),
        (12293, 2, BF16, F32, 1024),
    ],
)
def test_sum_and_norm(H, M, dtype, weights, threads):
    x, r = (normal(1, M, H, dtype=dtype, seed=i) for i in range(2))
    weight = normal(H, dtype=weights, seed=2)
    with emulator.emulated(emulator.Options(order=3)) as launches:
        h, normed = add_norm(x, r, weight, EPS)
    assert [launch.kernel for launch in launches] == ["add_norm"]
    assert launches[0].threadgroup == (threads // (2 if H > 12288 else 1), 1, 1)  # each does the work of two of MLX's
    assert same_bits(h, x + r)
    assert same_bits(normed, normed_in_order(h, weight, EPS, threads))
    stock = mx.fast.rms_norm(h, weight, EPS)
    assert normed.dtype == stock.dtype
    assert no_worse(normed, stock, rms(exact(h), exact(weight), EPS))
    assert [launches[0][name].reread for name in ("x", "r")] == [1.0, 1.0]


@linux_only
@pytest.mark.parametrize(("H", "dtype", "contraction"), [(130, BF16, "fast"), (4101, F32, "off")])
def test_a_row_of_a_sum_has_the_bits_it_has_alone(H, dtype, contraction):
    x, r, weight = (normal(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(1, 16, H), (1, 16, H), (H,)]))
    with emulator.emulated(emulator.Options(fp_contract=contraction)):
        together = add_norm(x, r, weight, EPS)
        for row in (0, 7, 8, 15):
            alone = add_norm(x[:, row : row + 1], r[:, row : row + 1], weight, EPS)
            among = add_norm(spoilt(x, row), r, weight, EPS)
            for some, one, all_ in zip(among, alone, together, strict=True):
                assert same_bits(one[:, 0], all_[:, row])
                assert same_bits(one[:, 0], some[:, row])


def test_sums_without_the_kernel():
    x, weight = normal(2, 3, 20, dtype=BF16), normal(20, dtype=BF16)
    for x_, r in ((x, x), (x, x.astype(F32))):
        with emulator.emulated() as launches:
            got = add_norm(x_, r, weight, EPS) if r.dtype == F32 else add_norm_ref(x_, r, weight, EPS)
        assert not launches
        assert all(map(same_bits, got, (x + r, mx.fast.rms_norm(x + r, weight, EPS))))
    with pytest.raises(ValueError, match=r"x has shape \(2, 3, 20\) and r \(2, 3, 1\); they must have the same"):
        add_norm(x, x[..., :1], weight, EPS)
    with pytest.raises(ValueError, match=r"weight has shape \(19,\); for these rows it must be \(20,\)"):
        add_norm(x, x, weight[:19], EPS)


def freqs(dims: int) -> mx.array:
    return mx.exp(mx.arange(dims // 2) * (9 / dims)) * (1 + mx.arange(dims // 2) % 3)


def rotated(x: np.ndarray, rope: RopeArguments, offset: int) -> np.ndarray:
    """Return [1, L, H, D] transposed to [1, H, L, D] and rotated, in float64."""
    half, x = rope.dims // 2, x.swapaxes(1, 2).copy()
    if rope.freqs is not None:
        rates = 1 / exact(rope.freqs)
    else:
        assert rope.base is not None
        rates = float(rope.base) ** (-np.arange(half) / half)
    angles = (offset + np.arange(x.shape[2]))[:, None] * rope.scale * rates
    one, two = (
        (np.arange(half) * 2, np.arange(half) * 2 + 1)
        if rope.traditional
        else (np.arange(half), np.arange(half) + half)
    )
    a, b = x[..., one] * rope.mscale, x[..., two] * rope.mscale
    x[..., one], x[..., two] = a * np.cos(angles) - b * np.sin(angles), a * np.sin(angles) + b * np.cos(angles)
    return x


def heads(L, D, dtype, wide=0, weights=None):
    """Return q of 3 heads and k of 2, views of one product with `wide` more values per query, and both weights."""
    product = normal(1, L, 3 * (D + wide) + 2 * D, dtype=dtype)
    q, k = mx.split(product, [3 * (D + wide)], axis=-1)
    q_weight, k_weight = (normal(D, dtype=weights or dtype, seed=i) for i in (1, 2))
    norms = {"q_weight": q_weight, "k_weight": k_weight, "eps": EPS}
    return q.reshape(1, L, 3, D + wide), k.reshape(1, L, 2, D), norms


CASES = [
    (BF16, 128, 4, 7, True, RopeArguments(128, base=1e6)),
    (F32, 192, 3, 131072, True, RopeArguments(64, traditional=True, base=5e6, scale=0.25)),
    (F32, 80, 2, 131072, False, RopeArguments(80, base=1e4)),
    (F32, 80, 5, 0, False, RopeArguments(64, traditional=True, base=1e4)),
    (F16, 64, 3, 40000, False, RopeArguments(64, traditional=True, freqs=freqs(64), mscale=1.19)),
    (BF16, 6, 4, 131072, True, RopeArguments(4, base=1e4)),
]


@linux_only
@pytest.mark.parametrize(("dtype", "D", "L", "offset", "norm", "rope"), CASES)
def test_norm_and_rotation(dtype, D, L, offset, norm, rope):
    q, k, weights = heads(L, D, dtype, wide=D if norm else 0)
    more = weights if norm else {}
    with emulator.emulated(emulator.Options(order=5)) as launches:
        got = norm_rope(q, k, mx.array([offset]), rope, **more, head_dim=D)
        again = norm_rope(q, k, offset, rope, **more)
    assert [launch.kernel for launch in launches] == ["norm_rope"] * 2
    assert all(map(same_bits, got, again))
    stock = norm_rope_ref(q, k, offset, rope, **more)
    for x, weight, y, theirs in zip((q[..., :D], k), ("q_weight", "k_weight"), got, stock, strict=True):
        values = rms(exact(x), exact(weights[weight]), EPS) if norm else exact(x)
        assert y.shape == theirs.shape
        assert y.dtype == theirs.dtype
        assert no_worse(y, theirs, rotated(values, rope, offset))
        rest = normed_in_order(x, weights[weight], EPS, 64 if D > 128 else 32) if norm else x
        assert same_bits(y[..., rope.dims :], rest.swapaxes(1, 2)[..., rope.dims :])
    assert launches[0]["q"].distinct_read == L * 3 * D * dtype.size
    assert launches[0]["q"].reread == launches[0]["k"].reread == 1.0


@linux_only
@pytest.mark.parametrize(("dtype", "D"), [(BF16, 128), (F32, 200)])
def test_position_0_leaves_the_norm(dtype, D):
    q, k, weights = heads(1, D, dtype)
    with emulator.emulated():
        got = norm_rope(q, k, 0, RopeArguments(D, base=1e4), **weights)
    for x, name, y in zip((q, k), ("q_weight", "k_weight"), got, strict=True):
        assert same_bits(y[:, :, 0], normed_in_order(x, weights[name], EPS, 64 if D > 128 else 32)[:, 0])


@linux_only
def test_position_0_leaves_the_product_with_mscale():
    """Both factors and their product have the rows' type, as in mlx-lm."""
    q, k, _ = heads(1, 64, F16)
    rope = RopeArguments(48, freqs=freqs(48), mscale=1.1906)
    with emulator.emulated():
        got = norm_rope(q, k, 0, rope)
    assert all(map(same_bits, got, norm_rope_ref(q, k, 0, rope)))


@linux_only
@pytest.mark.parametrize(("dtype", "contraction", "norm"), [(BF16, "fast", True), (F32, "off", False)])
def test_a_row_of_heads_has_the_bits_it_has_alone(dtype, contraction, norm):
    q, k, weights = heads(16, 80, dtype, weights=F32)
    rope, more = RopeArguments(64, base=1e4), weights if norm else {}
    with emulator.emulated(emulator.Options(fp_contract=contraction)):
        together = norm_rope(q, k, 1000, rope, **more)
        for row in (0, 7, 8, 15):
            alone = norm_rope(q[:, row : row + 1], k[:, row : row + 1], mx.array(1000 + row), rope, **more)
            among = norm_rope(spoilt(q, row), spoilt(k, row), 1000, rope, **more)
            for some, one, all_ in zip(among, alone, together, strict=True):
                assert same_bits(one[:, :, 0], all_[:, :, row])
                assert same_bits(one[:, :, 0], some[:, :, row])


@linux_only
def test_weights_of_another_type_decide_the_result():
    q, k, weights = heads(2, 32, BF16, weights=F32)
    with emulator.emulated(emulator.Options(fp_contract="fast")) as launches:
        got = norm_rope(q, k, 3, RopeArguments(32, base=1e4), **weights)
    assert len(launches) == 1
    want = norm_rope_ref(q, k, 3, RopeArguments(32, base=1e4), **weights)
    for y, w in zip(got, want, strict=True):
        assert y.dtype == w.dtype == F32
        assert np.abs(exact(y) - exact(w)).max() < 2e-6


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LONG = {"original_max_position_embeddings": 64, "short_factor": [1.0] * 16, "long_factor": [1.5] * 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.5}


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"type": "linear", "factor": 4.0},
        {"type": "llama3", **LLAMA3},
        {"type": "yarn", **YARN},
        {"type": "longrope", **LONG},
        {"type": "proportional", "partial_rotary_factor": 0.5},
    ],
)
def test_modules_are_read(scaling, traditional):
    """The reference has the bits of the module for every row."""
    module = rope_utils.initialize_rope(32, 1e4, traditional, scaling, 512)
    rope = RopeArguments.of(module)
    assert rope is not None
    q, k, _ = heads(3, 48, BF16)
    got = norm_rope_ref(q, k, 60, rope)
    assert all(map(same_bits, got, (module(x.swapaxes(1, 2), offset=60) for x in (q, k))))
    if scaling and scaling["type"] in ("yarn", "longrope"):
        assert rope.mscale > 1


def test_other_modules_are_not_read():
    class Other(nn.RoPE):
        pass

    assert (
        RopeArguments.of(rope_utils.initialize_rope(32, 1e4, False, {"type": "dynamic", "factor": 2.0}, 512)) is None
    )
    assert RopeArguments.of(Other(32)) is None
    assert RopeArguments.of(nn.Linear(2, 2)) is None


@linux_only
def test_views_are_read_without_a_copy():
    q, k, weights = heads(2, 64, BF16)
    spread = [mx.repeat(weights[name], 2)[::2] for name in ("q_weight", "k_weight")]
    odd, even, rope = q.astype(F16)[..., 1::2], k.astype(F16)[..., ::2], RopeArguments(32, freqs=freqs(32))
    with emulator.emulated():
        got = norm_rope(q, k, 9, RopeArguments(64, base=1e4), q_weight=spread[0], k_weight=spread[1], eps=EPS)
        want = norm_rope(mx.contiguous(q), mx.contiguous(k), 9, RopeArguments(64, base=1e4), **weights)
        assert all(map(same_bits, got, want))
        got = norm_rope(odd, even, 9, RopeArguments(32, freqs=mx.repeat(freqs(32), 3)[::3]))
        want = norm_rope(mx.contiguous(odd), mx.contiguous(even), 9, rope)
        assert all(map(same_bits, got, want))


@linux_only
def test_sequences_have_their_own_positions():
    q, k, weights = heads(6, 128, BF16)
    q, k, rope = q.reshape(3, 2, 3, 128), k.reshape(3, 2, 2, 128), RopeArguments(64, base=1e4)
    with emulator.emulated() as launches:
        got = norm_rope(q, k, mx.array([5, 900, 0]), rope, **weights)
        each = [norm_rope(q[i : i + 1], k[i : i + 1], at, rope, **weights) for i, at in enumerate((5, 900, 0))]
    assert len(launches) == 1 + 3
    assert all(same_bits(y, mx.concatenate(rows)) for y, rows in zip(got, zip(*each, strict=True), strict=True))


@linux_only
def test_heads_that_the_kernel_does_not_support():
    rope = RopeArguments(32, base=1e4)
    q, k, _ = heads(2, 260, F32)
    both = mx.concatenate([q, q]), mx.concatenate([k, k])
    with emulator.emulated() as launches:
        wide = norm_rope(q, k, 5, rope)
        batch = norm_rope(*both, 5, rope, head_dim=64)
        mixed = norm_rope(q, k.astype(F16), 5, rope)
    assert not launches
    assert all(map(same_bits, wide, norm_rope_ref(q, k, 5, rope)))
    assert all(map(same_bits, batch, norm_rope_ref(*both, 5, rope, head_dim=64)))
    assert [x.dtype for x in mixed] == [F32, F16]


def test_what_is_refused():
    q, k, weights = heads(2, 32, F32)
    rope = RopeArguments(32, base=1e4)
    with pytest.raises(ValueError, match=r"they must be \[B, L, heads, values\], of one B and L"):
        norm_rope(q[:, :1], k, 0, rope)
    with pytest.raises(ValueError, match=r"rope\.dims is 64; it must be at most 32, the values of a head"):
        norm_rope(q, k, 0, RopeArguments(64, base=1e4), head_dim=32)
    with pytest.raises(ValueError, match="head_dim is 33; it must be from 32, the rotated values, to 32, the values"):
        norm_rope(q, k, 0, rope, head_dim=33)
    with pytest.raises(ValueError, match="only one of q_weight and k_weight is given"):
        norm_rope(q, k, 0, rope, q_weight=weights["q_weight"])
    with pytest.raises(ValueError, match=r"a weight has shape \(31,\); it must be \(32,\)"):
        norm_rope(q, k, 0, rope, q_weight=weights["q_weight"], k_weight=mx.ones(31))
    with pytest.raises(ValueError, match="offset has 2 values; it must have one"):
        norm_rope(q, k, mx.array([0, 1]), rope)
    for wrong in ({"dims": 3}, {"base": None}, {"freqs": freqs(32)}, {"base": None, "freqs": freqs(30)}):
        with pytest.raises(ValueError, match="must be"):
            replace(rope, **wrong)
