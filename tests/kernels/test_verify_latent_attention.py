"""Check verify_latent_attention: the formula, each row's own bits, and one read of the latents for all rows."""

import sys
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from exact import bits_of, same_bits
from metal_cases import counted_launches, exact, linux_only
from sweep import sampled, sweep

from mlx_mtp import emulator
from mlx_mtp.kernels import verify_latent_attention, verify_latent_attention_ref
from mlx_mtp.layers.mla import AbsorbedMLA

F16, BF16, F32 = mx.float16, mx.bfloat16, mx.float32
NAN, INF = float("nan"), float("inf")
MODULE = sys.modules["mlx_mtp.kernels.verify_latent_attention"]  # in the package its name is the function's
LAUNCHES = ["latent_scores", "latent_values", "attention_merge"]


def draw(heads, L, dv, dr, S, dtype):
    """Return q, q_pe, latent and k_pe; scores spread by a few units, as those of trained models do."""
    shapes = ((1, heads, L, dv), (1, heads, L, dr), (1, 1, S, dv), (1, 1, S, dr))
    return [(1.5 * mx.random.normal(shape)).astype(dtype) for shape in shapes]


def scale_of(q, q_pe):
    return (q.shape[-1] + q_pe.shape[-1]) ** -0.5


def spoilt(buffer, offset, value=NAN):
    """Return the buffer with `value` in every slot from `offset` on."""
    return mx.where(mx.arange(buffer.shape[2])[:, None] < offset, buffer, mx.array(value, buffer.dtype))


def attend(q, q_pe, latent, k_pe, offset, limit=None, options=None, start=0):
    """Return the kernels' result and their traffic, by name."""
    with emulator.emulated(options) as launches:
        out = verify_latent_attention(
            *(q, q_pe, latent, k_pe, mx.array([offset])),
            scale=scale_of(q, q_pe),
            limit=limit or latent.shape[2],
            start=start,
        )
    assert [launch.kernel for launch in launches] == LAUNCHES
    assert out.shape == q.shape
    return out, {launch.kernel: launch for launch in launches}


def in_float64(q, q_pe, latent, k_pe, offset, start=0):
    """Attend from each row alone to exactly its visible positions, in float64."""
    q, q_pe, latent, k_pe = (exact(x) for x in (q, q_pe, latent, k_pe))
    scale, out = scale_of(q, q_pe), np.zeros(q.shape)
    for i in range(q.shape[2]):
        last = offset + i
        seen = slice(min(start, last), last + 1)
        keys, keys_pe = latent[0, 0, seen], k_pe[0, 0, seen]
        scores = scale * (q[0, :, i] @ keys.T + q_pe[0, :, i] @ keys_pe.T)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[0, :, i] = weights / weights.sum(-1, keepdims=True) @ keys
    return out


def error(got, want):
    return float(np.abs(exact(got) - want).max())


def stock(q, q_pe, latent, k_pe, offset):
    """Return the layer's result in plain MLX ops."""
    positions = mx.arange(latent.shape[2])
    mask = positions <= offset + mx.arange(q.shape[2])[:, None]
    layer = SimpleNamespace(scale=scale_of(q, q_pe))
    return AbsorbedMLA.attend(layer, q, q_pe, latent, latent, k_pe, mask)


def check_values(heads, L, dv, dr, S, offset, dtype, start=0):
    """Compare with float64, rounded only at the end; return launches, error, and the error of plain ops."""
    q, q_pe, latent, k_pe = draw(heads, L, dv, dr, S, dtype)
    want = in_float64(q, q_pe, latent, k_pe, offset, start)
    got, launches = attend(q, q_pe, spoilt(latent, offset + L), spoilt(k_pe, offset + L), offset, start=start)
    assert got.dtype == dtype
    rounded = np.abs(want) * {F32: 2**-24, F16: 2**-11, BF16: 2**-8}[dtype]
    assert (np.abs(exact(got) - want) <= rounded + 3e-6 * np.abs(want).max()).all()
    return launches, error(got, want), error(stock(q, q_pe, latent, k_pe, offset), want)


@sweep
@linux_only
def test_values_at_the_sizes_of_released_models():
    """128 heads, 512 and 64 values (DeepSeek-V3); the latent is read once as keys and once as values."""
    launches, ours, plain = check_values(128, 3, 512, 64, 32, 20, BF16)
    assert ours < plain
    for name in LAUNCHES[:2]:
        assert launches[name]["latent"].bytes_read == 23 * 512 * 2
    assert launches["latent_scores"]["k_pe"].bytes_read == 23 * 64 * 2
    assert launches["latent_values"]["ml"].bytes_written == 2 * 4 * 128 * 3
    assert launches["latent_scores"].threadgroup_bytes == 576 * 16 * 2
    assert launches["latent_values"].threadgroup_bytes == 16384


@linux_only
@pytest.mark.parametrize(
    ("heads", "offset", "S", "start"),
    sampled(
        [(1, 0, 8, 0), (5, 254, 513, 0), (2, 509, 512, 3)],
        [(1, 0, 8, 0), (3, 253, 256, 0), (5, 254, 513, 0), (2, 509, 512, 3), (1, 1, 300, 2)],
    ),
)
def test_values_in_float32(heads, offset, S, start):
    """The first row of all, the ends of chunks and buffers, and a cache without contents before `start`."""
    launches, *_ = check_values(heads, 3, 64, 16, S, offset, F32, start)
    assert launches["latent_values"]["latent"].reread == 1.0


@linux_only
def test_errors_in_float32():
    """At most twice those of plain ops, over several draws, because a single one may favour either."""
    _, ours, plain = zip(*(check_values(4, 3, 64, 16, 300, 290, F32) for _ in range(6)), strict=True)
    assert sum(ours) < 2 * sum(plain)


@pytest.fixture
def unrounded(monkeypatch):
    """Let the last launch write float32, because 16 bits hide most differences of the sums."""
    merge = MODULE.merge
    monkeypatch.setattr(MODULE, "merge", lambda out, ml, rows, dtype: merge(out, ml, rows, F32))


def rows_alone(q, q_pe, latent, k_pe, offset, rows, options, S):
    """Launch each of `rows` alone in a buffer of S slots, with other contents in later slots."""
    for i in rows:
        parts = [spoilt(x, offset + i + 1, (NAN, INF, -INF, 7.0)[i % 4])[:, :, :S] for x in (latent, k_pe)]
        one = [x[:, :, i : i + 1] for x in (q, q_pe)]
        yield i, attend(*one, *parts, offset + i, offset + i + 1, options)[0]


@linux_only
@pytest.mark.parametrize(
    ("contraction", "offset"), sampled([("fast", 250)], [("off", 250), ("fast", 250), ("fast", 292)])
)
@pytest.mark.usefixtures("unrounded")
def test_a_row_has_the_bits_that_it_has_alone(contraction, offset):
    """For any L, other rows and their slots, slots that no row attends to, capacity and limit."""
    heads, L = 17, 16
    q, q_pe, latent, k_pe = draw(heads, L, 32, 8, 320, F16)
    options = emulator.Options(fp_contract=contraction)
    many, _ = attend(q, q_pe, latent, k_pe, offset, options=options)
    for i, one in rows_alone(q, q_pe, latent, k_pe, offset, sampled((5, 15), (0, 2, 5, 15)), options, offset + 17):
        assert same_bits(one, many[:, :, i : i + 1])
    options = emulator.Options(fp_contract=contraction, order="reverse")
    q[:, :, 5], q[:, 3, 1], latent[:, :, offset + 4 :] = NAN, INF, NAN
    among, _ = attend(q, q_pe, latent, k_pe, offset, limit=offset + L, options=options)
    assert np.array_equal(bits_of(among[:, :, [0, 2, 3]]), bits_of(many[:, :, [0, 2, 3]]))
    assert same_bits(among[:, 4:, 1], many[:, 4:, 1])
    assert np.isnan(np.array(among[:, :, 4:])).all()


@linux_only
@pytest.mark.usefixtures("unrounded")
def test_rows_that_look_at_chosen_slots():
    """Each row has its own slots, some not visible to it; bits are those of the row alone, and of all slots."""
    heads, L, offset, S, count = 5, 3, 400, 448, 290
    q, q_pe, latent, k_pe = draw(heads, L, 32, 8, S, F16)
    rng = np.random.default_rng(0)
    lists = [np.sort(rng.choice(offset + i + 1, count - 2, replace=False)) for i in range(L)]
    chosen = mx.array([[*found.tolist(), offset + L + i, S - 1] for i, found in enumerate(lists)], mx.uint32)
    latent[:, :, offset + L :], k_pe[:, :, offset + L :] = NAN, INF
    where, more = (mx.array([offset]),), {"scale": scale_of(q, q_pe), "limit": S}
    with emulator.emulated() as launches:
        many = verify_latent_attention(q, q_pe, latent, k_pe, *where, **more, chosen=chosen)
        for i in range(L):
            one = [x[:, :, i : i + 1] for x in (q, q_pe)]
            at = mx.array([offset + i])
            alone = verify_latent_attention(*one, latent, k_pe, at, **more, chosen=chosen[i : i + 1])
            assert same_bits(alone, many[:, :, i : i + 1])
            gathered = [x[:, :, mx.array(lists[i])] for x in (latent, k_pe)]
            dense = {"scale": more["scale"], "limit": count - 2}
            of_all = verify_latent_attention(*one, *gathered, mx.array([count - 3]), **dense)
            assert same_bits(of_all, alone)
    assert launches[1]["latent"].bytes_read == sum(map(len, lists)) * 32 * 2
    want = verify_latent_attention_ref(q, q_pe, latent, k_pe, *where, scale=more["scale"], chosen=chosen)
    assert mx.allclose(many, want, atol=2e-3)


@linux_only
def test_extremes():
    """A score of -infinity has no weight; +infinity or NaN makes its row NaN, as in the reference."""
    q, q_pe, latent, k_pe = draw(34, 1, 32, 8, 300, F16)
    q, offset = mx.abs(q), 290
    for value, slots in ((-INF, slice(0, 256)), (INF, slice(3, 4)), (NAN, slice(270, 271))):
        buffer = latent * 1
        buffer[:, :, slots] = value
        got, _ = attend(q, q_pe, buffer, k_pe, offset)
        want = verify_latent_attention_ref(q, q_pe, buffer, k_pe, mx.array([offset]), scale=scale_of(q, q_pe))
        assert mx.allclose(got, want, atol=2e-3, equal_nan=True)
        assert mx.isnan(got).all() == (value != -INF)


@linux_only
@pytest.mark.parametrize(("offset", "limit"), [(290, 280), (400, 300)])
def test_nothing_is_read_beyond_the_buffers(offset, limit):
    """A wrong offset or limit gives a wrong result, but no access out of bounds."""
    attend(*draw(34, 1, 32, 8, 300, F16), offset, limit)


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_many_groups_of_threads_at_every_length(dtype):
    for limit in (1024, 1500, 4096, 30000):
        q, q_pe, latent, k_pe = (
            mx.zeros(shape, dtype)
            for shape in ((1, 128, 1, 512), (1, 128, 1, 64), (1, 1, limit, 512), (1, 1, limit, 64))
        )
        with counted_launches() as launches:
            verify_latent_attention(q, q_pe, latent, k_pe, mx.array([limit - 1]), scale=1.0, limit=limit)
        assert [name for name, _ in launches] == LAUNCHES
        assert min(groups for _, groups in launches) >= 64


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_reference_is_the_formula(dtype):
    parts = draw(3, 4, 32, 8, 40, dtype)
    for offset, start in ((20, 0), (36, 5), (1, 2)):
        want = in_float64(*parts, offset, start)
        spoilt_parts = [*parts[:2], *(spoilt(x, offset + 4) for x in parts[2:])]
        scale = scale_of(*parts[:2])
        got = verify_latent_attention_ref(*spoilt_parts, mx.array([offset]), scale=scale, start=start)
        assert error(got, want) < np.abs(want).max() * (1e-6 if dtype == F32 else 2**-8)


@linux_only
def test_the_reference_computes_what_the_kernels_do_not_support():
    for dv, dr, other in ((48, 8, F16), (32, 12, F16), (1024, 8, F16), (32, 8, F32)):
        q, q_pe, latent, k_pe = draw(2, 2, dv, dr, 16, F16)
        latent, where = latent.astype(other), {"scale": scale_of(q, q_pe)}
        with emulator.emulated() as launches:
            got = verify_latent_attention(q, q_pe, latent, k_pe, mx.array([5]), limit=16, **where)
        assert not launches
        assert same_bits(got, verify_latent_attention_ref(q, q_pe, latent, k_pe, mx.array([5]), **where))


def test_what_does_not_fit():
    q, q_pe, latent, k_pe = draw(2, 2, 32, 8, 16, F32)
    for wrong, message in (
        (
            (q, q_pe[:, :1], latent, k_pe),
            r"q_pe has shape \(1, 1, 2, 8\); with the other arrays it must be \(1, 2, 2, 8\)",
        ),
        (
            (q, q_pe, latent[..., :24], k_pe),
            r"latent has shape \(1, 1, 16, 24\); with the other arrays it must be \(1, 1, 16, 32\)",
        ),
        (
            (q, q_pe, latent, k_pe[:, :, :8]),
            r"k_pe has shape \(1, 1, 8, 8\); with the other arrays it must be \(1, 1, 16, 8\)",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            verify_latent_attention(*wrong, mx.array([0]), scale=1.0, limit=16)
    for limit in (1, 17):
        with pytest.raises(ValueError, match=f"limit is {limit}; it must be from 2, the rows, to 16, the slots"):
            verify_latent_attention(q, q_pe, latent, k_pe, mx.array([0]), scale=1.0, limit=limit)


def swept(dtype):
    """Draw heads, rows, widths and positions: arguments of `draw` without the dtype, and offset."""
    chosen = np.random.default_rng(dtype.size)
    for dv, dr in ((32, 8), (64, 16), (96, 24), (512, 64)):
        for L in (1, 2, 5, 8):
            heads = int(chosen.integers(1, 41 if dv < 512 else 9))
            S = int(chosen.integers(L, 600))
            offset = int(chosen.choice([0, S - L, min(S - L, 256 - L + 1), chosen.integers(0, S - L + 1)]))
            yield (heads, L, dv, dr, S), max(offset, 0)


@sweep
@linux_only
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_sweep_of_values(dtype):
    for shape, offset in swept(dtype):
        launches, ours, plain = check_values(*shape, offset, dtype)
        assert dtype == F32 or ours <= 2 * plain
        assert launches["latent_values"]["latent"].reread == launches["latent_scores"]["latent"].reread == 1.0


@sweep
@linux_only
@pytest.mark.parametrize("contraction", ["off", "on", "fast"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.usefixtures("unrounded")
def test_sweep_of_bits(dtype, contraction):
    options = emulator.Options(fp_contract=contraction)
    for shape, offset in swept(dtype):
        parts, L = draw(*shape, dtype), shape[1]
        many, _ = attend(*parts, offset, options=options)
        for i, one in rows_alone(*parts, offset, {0, L // 2, L - 1}, options, offset + L):
            assert same_bits(one, many[:, :, i : i + 1])
