"""Check verify_attention: a query has the bits that it has alone, and all share one pass over the cache."""

import itertools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from attention_cases import Case, attended, by_stock, draw, in_float64
from exact import CONTRACTIONS, DTYPES, same_bits, sdpa_vector_2pass
from metal_cases import counted_launches, exact, linux_only, relative_error
from sweep import SWEEP, sampled, sweep

from mlx_mtp import emulator
from mlx_mtp.cache import kinds
from mlx_mtp.emulator.stock import fused, sdpa_vector
from mlx_mtp.kernels import verify_attention, verify_attention_ref
from mlx_mtp.kernels.verify_attention import FIRST_CHUNKS, GROUPS, Chunks, geometry, merge

pytestmark = linux_only

CASES = [
    Case(),
    Case(Hkv=2, G=4, L=4, D=64, Dv=64, dtype=mx.bfloat16, offset=509, slots=576, gate="head"),
    Case(G=12, L=2, D=128, Dv=128, dtype=mx.float16, offset=254, slots=256, sinks=True),
    Case(G=3, L=8, offset=133, slots=96, window=64, gate="value"),
    Case(Hkv=2, G=2, L=4, D=64, Dv=32, offset=150, slots=160, window=128, sinks=True, start=40, dtype=mx.bfloat16),
    Case(G=6, L=2, D=256, Dv=256, offset=40, slots=64, start=7, dtype=mx.bfloat16, gate="value"),
    Case(G=2, L=5, D=64, Dv=64, offset=77, slots=128, bits=4, group=64, dtype=mx.float16),
    Case(G=2, L=3, D=64, Dv=128, offset=90, slots=96, window=64, bits=8, group=32, start=2, sinks=True),
    Case(G=8, gate="head"),  # compiled for four queries, one of them missing: a whole block of 8 rows
    Case(G=3, L=16, offset=133, slots=96, window=64, gate="value"),
    Case(Hkv=2, G=2, L=9, D=64, Dv=64, offset=77, slots=128, bits=8, group=64, dtype=mx.float16),
    Case(G=6, L=13, D=256, Dv=256, offset=40, slots=64, start=7, dtype=mx.bfloat16),  # two groups of 6 blocks of rows
    Case(G=12, L=16, D=64, Dv=64, dtype=mx.bfloat16, offset=30, slots=64, sinks=True),  # two groups of 12
]


def error(y, want) -> float:
    return float(np.abs(exact(y).reshape(want.shape) - want).max() / np.abs(want).max())


def check(case: Case, contraction: str) -> None:
    """Compare values, within twice the error of MLX's operations, and each row's bits with the row alone."""
    drawn = draw(case)
    with emulator.emulated(emulator.Options(fp_contract=contraction)) as launches:
        y = attended(drawn)
        assert len(launches) == 2
        ring = case.window is not None
        for i in sorted({0, case.L // 2, case.L - 1}):
            alone = attended(drawn.rows(i, i + 1), slots=None if ring else case.offset + i + 1, limit=1000)
            assert same_bits(y[:, i], alone[:, 0]), f"row {i}"
            # Queries, keys and values of later rows are NaN or infinite.
            spoilt = draw(case)
            later = mx.arange(case.L)[:, None] > i
            spoilt.q = mx.where(later, float("nan"), spoilt.q)
            hidden = attended(spoilt, hidden=case.L - 1 - i)
            assert same_bits(y[:, : i + 1], hidden[:, : i + 1]), f"row {i} with wild later rows"
            assert mx.all(mx.isnan(hidden[:, i + 1 :]))
    want = in_float64(drawn)
    # A query that attends to itself only is exact in MLX, except for one rounding of a quantized value.
    assert error(y, want) <= 2 * max(error(by_stock(drawn), want), 2**-24)


# Gates of both kinds, windows, sinks and a start, and both widths of codes.
@pytest.mark.parametrize("number", sampled((1, 6, 8, 9), range(len(CASES))))
def test_rows_are_what_they_are_alone(number):
    check(CASES[number], CONTRACTIONS[number % 3])


@sweep
@pytest.mark.parametrize("contraction", CONTRACTIONS[1:])
def test_rows_are_what_they_are_alone_when_contracted(contraction):
    check(CASES[3], contraction)


@pytest.mark.parametrize("window", sampled([40], [None, 40]))
def test_an_infinity_reaches_those_that_see_it(window):
    """The value is visible to the first query only, to all, or only to later ones."""
    case = Case(G=3, L=3, offset=61, slots=72, window=window)
    drawn = draw(case)
    for position, column in ((case.seen(0)[0], 3), (50, 9), (62, 18), (63, 31)):
        drawn.values[0, 0, position, column] = float("inf") if column % 2 else float("nan")
    with emulator.emulated():
        y = attended(drawn)
        alone = [attended(drawn.rows(i, i + 1)) for i in range(3)]
    want = in_float64(drawn)
    assert (~np.isfinite(want)).sum(1).tolist() == ([6, 9, 12] if window is None else [6, 6, 9])
    assert np.array_equal(exact(y), exact(mx.concatenate(alone, axis=1)), equal_nan=True)
    assert np.allclose(exact(y)[0], want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_at_every_place_of_a_ring():
    every = [*range(4), *range(36, 44), *range(66, 78), *range(140, 148), 214, 300, 600]
    for offset in sampled((0, 2, 38, 40, 69, 71, 72, 142, 144, 600), every):
        case = Case(L=3, offset=offset, slots=72, window=40, start=2)
        with emulator.emulated():
            y = attended(draw(case), limit=offset + case.L + offset % 7)
        assert error(y, in_float64(draw(case))) < 2e-6, offset


def test_at_every_place_of_a_buffer():
    every = [*range(4), *range(26, 34), *range(60, 66), *range(250, 258), 1021, 1086, 2047, 4096, 4223, 8703]
    for offset in sampled((0, 1, 28, 30, 31, 61, 253, 255, 1086), every):
        case = Case(L=3, offset=offset, slots=offset + 3)
        with emulator.emulated():
            y = attended(draw(case))
        assert error(y, in_float64(draw(case))) < 2e-6, offset


@pytest.mark.parametrize(
    ("window", "bits"), sampled([(32, None), (None, 4)], itertools.product((32, None), (None, 4)))
)
def test_it_sees_what_a_cache_shows(window, bits):
    """Verify three rows, with rollbacks of up to two, after a prompt that wraps the ring."""
    n = 20 if window is None else 46
    kv = kinds.make_cache(window, start=3, bits=bits, group_size=32)
    kv.update_and_fetch(*mx.random.normal((2, 1, 1, n, 32)))
    kv.seek(mx.array([n]), n)
    for back in (2, 0, 1, *[0] * (14 if SWEEP else 5)):
        q, k, v = mx.random.normal((3, 1, 2, 3, 32))
        offset, mask = kv.offset, kv.make_mask(3)
        seen = kv.update_and_fetch(k[:, :1], v[:, :1])
        whole = kv.parts if bits is None else (kv.parts[:3], kv.parts[3:])
        with emulator.emulated():
            y = verify_attention(
                q, *whole, offset, scale=0.2, limit=kv.limit, window=window, start=3, bits=bits, group_size=32
            )
        if bits is not None:
            seen = [mx.dequantize(*x, 32, bits) for x in seen]
        want = mx.fast.scaled_dot_product_attention(q, *seen, scale=0.2, mask=mask)
        assert relative_error(y, exact(want.swapaxes(1, 2).reshape(1, 3, -1))) < 2e-6
        kv.seek(kv.offset - back, kv.limit)


@pytest.mark.parametrize(
    ("case", "factor"),
    [
        (Case(Hkv=2, G=4, L=2, offset=290, slots=512, D=64, Dv=64), 8),
        (Case(G=8, L=4, offset=300, slots=160, window=128, D=64, Dv=32), 32),
        (Case(G=2, L=8, offset=200, slots=256, bits=4, dtype=mx.float16), 16),
    ],
)
def test_keys_and_values_are_requested_once(case, factor):
    with emulator.emulated() as launches:
        attended(draw(case), limit=case.offset + case.L + 300)
    traffic = launches[0]
    span = case.offset + case.L - case.seen(0)[0]
    for name, width in (("keys", case.D), ("values", case.Dv)):
        size = case.Hkv * span * width * (case.bits or 8 * case.dtype.size) // 8
        assert (traffic[name].bytes_read, traffic[name].reread) == (size, 1.0)
    assert traffic.threadgroup_bytes <= 32768


def test_mlx_asks_for_them_once_per_query_and_head():
    assert [fused(*x) for x in ((8, 4), (2, 12), (4, 12), (9, 1))] == [True, True, False, False]
    q, (k, v) = mx.random.normal((1, 8, 3, 64)), mx.random.normal((2, 1, 2, 100, 64))
    want = exact(mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal"))
    y, traffic = sdpa_vector(q, k, v, scale=0.125, causal=True)
    assert relative_error(y, want) < 2e-6
    unseen = 1 / 100  # by the first of the three queries two positions, by the second one
    assert traffic["keys"].reread == traffic["values"].reread == pytest.approx(12 * (1 - unseen))


@sweep
def test_mlx_asks_for_them_as_often_in_two_passes():
    q, (k, v) = mx.random.normal((1, 8, 3, 64)), mx.random.normal((2, 1, 2, 100, 64))
    y, first, second = sdpa_vector_2pass(q, k, v, scale=0.125, causal=True)
    want = exact(mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask="causal"))
    assert relative_error(y, want) < 2e-6
    assert first["keys"].reread >= 12 * (1 - 1 / 100)
    assert second["partials"].reread == 1.0


def test_a_group_of_threads_has_room():
    """32 KB of shared memory; sums, scores and 32 more words in 128 registers per thread, 208 KB per threadgroup."""
    for Dv in (32, 64, 96, 128, 192, 256, 512):
        for rows in (*range(1, 17), *range(24, 129, 8)):
            groups, chosen = geometry(rows, Dv)
            blocks, parts, threads = chosen["BLOCKS"], chosen["PARTS"], 4 * Dv // chosen["PARTS"]
            registers = 2 * blocks * (parts + 1) + 32
            assert 8 * blocks * groups >= rows
            assert 8 * blocks * 4 * (chosen["TILE"] + 4 + chosen["TILE"] // 32) <= 32768
            assert registers <= 128
            assert threads * registers * 4 <= 208 * 1024
            assert groups == 1 or Dv > 192


def groups_of(heads, kv_heads, width, limit, window=None):
    """Return the number of threadgroups in a launch of the first kernel."""
    slots = limit if window is None else window + 32
    q, (k, v) = mx.zeros((1, heads, 1, width)), mx.zeros((2, 1, kv_heads, slots, width))
    with counted_launches() as launches:
        verify_attention(q, k, v, mx.array([limit - 1]), scale=1.0, limit=limit, window=window)
    (op, groups), _ = launches
    assert op == "verify_attention"
    return groups


def test_many_groups_of_threads_at_every_length():
    for kv_heads, width in ((2, 256), (4, 256), (8, 128)):
        found = [groups_of(4 * kv_heads, kv_heads, width, limit) for limit in (1024, 1500, 2048, 8192, 70000)]
        assert found == sorted(found)
        assert GROUPS <= found[0] < found[-1] < 1200
    assert min(groups_of(96, 8, 128, limit, window=512) for limit in range(600, 664)) >= GROUPS
    assert groups_of(64, 8, 128, 512, window=512) >= GROUPS  # at 512 positions already


def test_chunks_follow_each_other():
    """`up_to` is the fewest chunks, as the kernel places them, that contain all positions below a limit."""
    for least, most in ((32, 512), (256, 512), (64, 64)):
        ends, size = [], least
        while not ends or ends[-1] < 20 * FIRST_CHUNKS:
            begin = ends[-1] if ends else 0
            size = min(most, least << max(0, (begin // FIRST_CHUNKS).bit_length()))
            ends.append(begin + size)
        for limit in range(1, 20 * FIRST_CHUNKS, 31):
            assert Chunks(least, most).up_to(limit) == 1 + sum(end < limit for end in ends)


def test_a_gate_of_any_strides():
    drawn = draw(CASES[3])
    L, G, Dv = drawn.case.L, drawn.case.G, drawn.case.Dv
    doubled = mx.random.normal((1, L, G, 2 * Dv))
    gate = doubled[..., Dv:]
    with emulator.emulated():
        drawn.gate = gate.reshape(1, L, -1)
        want = attended(drawn)
        drawn.gate = gate
        assert same_bits(attended(drawn), want)


def odd(x):
    """Return x as a slice of a larger array that starts at an odd element."""
    whole = mx.concatenate([mx.zeros(1, x.dtype), x.flatten()])
    mx.eval(whole)
    return whole[1:].reshape(x.shape)


def test_slices_that_begin_anywhere():
    drawn = draw(Case(G=2, L=2, offset=5, slots=8, dtype=mx.bfloat16))
    k, v = mx.random.normal((2, 1, 1, 8, 32)).astype(mx.bfloat16)
    more = {"scale": 0.2, "limit": 7}
    with emulator.emulated():
        want = verify_attention(drawn.q, k, v, mx.array([5]), **more)
        assert same_bits(verify_attention(odd(drawn.q), odd(k), odd(v), mx.array([5]), **more), want)


def test_order_of_threads_does_not_matter():
    drawn, got = draw(CASES[3]), []
    for order in ("forward", "reverse", 5):
        with emulator.emulated(emulator.Options(order=order)):
            got.append(attended(drawn))
    assert same_bits(got[0], got[1])
    assert same_bits(got[0], got[2])


def test_rows_beyond_a_group_of_threads():
    case = Case(G=12, L=6, D=32, Dv=256, offset=30, slots=64)
    assert geometry(72, 256)[0] == 2
    drawn = draw(case)
    with emulator.emulated():
        y, alone = attended(drawn), attended(drawn.rows(5, 6))
    assert same_bits(y[:, 5], alone[:, 0])
    assert error(y, in_float64(drawn)) < 2e-6


def test_merge_of_one_kv_head():
    """As in latent attention: Hkv = 1, row head * L + i; chunks that a row does not attend to may hold anything."""
    partials, sums = mx.random.normal((1, 3, 8, 64)), mx.random.uniform(1.0, 2.0, (1, 3, 8))
    largest = mx.random.normal((1, 3, 8))
    sums[:, 1, ::2] = 0.0
    unseen = sums == 0.0
    wild = mx.where(unseen[..., None], float("nan"), partials)
    with emulator.emulated():
        y = merge(wild, mx.stack([mx.where(unseen, 1e4, largest), sums], -1), 2, mx.float32)
    p = mx.exp(largest) * (sums > 0)
    want = (partials * p[..., None]).sum(1) / (sums * p).sum(1)[..., None]
    assert relative_error(y, exact(want[0].reshape(4, 2, 64).swapaxes(0, 1).reshape(1, 2, 256))) < 2e-6


@pytest.mark.parametrize("number", sampled(range(0, len(CASES), 5), range(len(CASES))))
def test_without_metal_it_is_the_reference(number):
    case = replace(CASES[number], dtype=mx.float32)
    drawn = draw(case)
    assert error(attended(drawn), in_float64(drawn)) < 2e-5


def test_a_shape_that_the_kernel_does_not_take():
    drawn = draw(Case(D=16, Dv=40))
    with emulator.emulated() as launches:
        y = attended(drawn)
    assert launches == []
    assert error(y, in_float64(drawn)) < 2e-6


def test_what_it_does_not_take():
    q, kv, offset = mx.zeros((1, 4, 2, 32)), mx.zeros((1, 2, 64, 32)), mx.array([3])
    more = {"scale": 1.0, "limit": 5}
    with pytest.raises(ValueError, match="q has 32 columns; the keys have 64"):
        verify_attention(q, mx.zeros((1, 2, 64, 64)), kv, offset, **more)
    with pytest.raises(ValueError, match="a whole number of query heads"):
        verify_attention(q, mx.zeros((1, 3, 64, 32)), kv, offset, **more)
    with pytest.raises(ValueError, match="bits is None, keys are 3 arrays"):
        verify_attention(q, mx.quantize(kv, 32, 4), mx.quantize(kv, 32, 4), offset, **more)
    with pytest.raises(ValueError, match=r"gate has shape \(1, 2, 5\); it must be \(1, 2, 4\), \(1, 2, 128\) or"):
        verify_attention(q, kv, kv, offset, gate=mx.zeros((1, 2, 5)), **more)
    assert verify_attention_ref(q, kv, kv, offset, scale=1.0).shape == (1, 2, 128)


@sweep
@pytest.mark.parametrize("seed", range(150))
def test_sweep(seed):
    random = np.random.default_rng(seed)
    window = random.choice([None, 32, 64, 128, 300])
    D, Dv = [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (32, 32)][random.integers(7)]
    offset, L = (
        int(random.choice([0, 5, 31, 60, 255, 300, 511])) + int(random.integers(4)),
        int(random.integers(1, 9)),
    )
    case = Case(
        Hkv=int(random.integers(1, 3)),
        G=int(random.integers(1, 17)),
        L=L,
        D=D,
        Dv=Dv,
        dtype=DTYPES[random.integers(3)],
        offset=offset,
        slots=int(offset + L + random.integers(1, 90)) if window is None else int(window) + 32,
        window=None if window is None else int(window),
        start=int(random.choice([0, 3, 40])),
        sinks=bool(random.integers(2)),
        gate=[None, "head", "value"][random.integers(3)],
        bits=[None, 4, 8][random.integers(3)],
        group=32,
    )
    check(case, CONTRACTIONS[seed % 3])
