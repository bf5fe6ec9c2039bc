"""Compare caches with a plain list of rows: windows, wraps, rollbacks, growth, in-place writes."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mtp.cache.growing import STEP, LinearKVCache
from mlx_mtp.cache.kinds import make_cache, make_caches
from mlx_mtp.cache.ring import CALL_ROWS, Ring

B, H, D = 1, 2, 32


def rows_of(positions, salt=0):
    """Return distinct rows [1, H, n, D] whose values encode their position."""
    n = len(positions)
    base = np.array(list(positions), np.float32).reshape(1, 1, n, 1) + salt
    return mx.array(np.broadcast_to(base, (B, H, n, D)).copy())


def attended(cache, keys, mask, n):
    """Return, per row, the sorted first components of the keys that it may attend to."""
    values = np.array(keys)[0, 0, :, 0]
    if mask is None:
        allowed = np.ones((n, len(values)), bool)
    elif isinstance(mask, str):
        allowed = np.tril(np.ones((n, len(values)), bool), len(values) - n)
    else:
        allowed = np.array(mask)
    return [sorted(values[row].tolist()) for row in allowed]


def expected(row_values, first, n, window, start, keep):
    """Return the same from a list: row i of n, at position first + i, attends to its window from `start` on."""
    out = []
    for q in range(first, first + n):
        low = max(min(start, q), keep, 0 if window is None else q - (window - keep) + 1)
        out.append(sorted(float(v) for v in (*row_values[: min(keep, q + 1)], *row_values[low : q + 1])))
    return out


steps = st.lists(
    st.one_of(
        st.tuples(st.just("prefill"), st.integers(1, 40), st.just(0)),
        st.tuples(st.just("verify"), st.integers(1, 8), st.integers(0, 8)),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=60, deadline=None)
@given(
    steps=steps,
    kind=st.one_of(
        st.tuples(st.sampled_from([None, 1, 4, 8, 33]), st.integers(0, 2), st.just(0)),
        st.tuples(st.sampled_from([2, 5, 8, 33]), st.just(0), st.integers(1, 4)),
    ),
)
def test_rows_see_exactly_their_window(steps, kind):
    """Mix prefill chunks (host positions) and verifies with rollbacks (device positions) in any order."""
    window, start, keep = kind
    keep = min(keep, (window or 1) - 1)
    cache, text, salt = make_cache(window, start=start, keep=keep), [], 0.0
    for kind, n, back in steps:
        first, salt = len(text), salt + 0.001
        if kind == "prefill" and first < start:
            continue  # prefill begins at `start`; only a verify may include earlier positions
        if kind == "verify":
            cache.seek(mx.array([first]), first + 1)  # a loose bound is allowed
        new = rows_of(range(first, first + n), salt)
        mask = cache.make_mask(n)
        keys, values = cache.update_and_fetch(new, new + 1000)
        text += np.array(new)[0, 0, :, 0].tolist()
        assert attended(cache, keys, mask, n) == expected(text, first, n, window, start, keep)
        assert mx.array_equal(values, mx.where(keys == 0, values, keys + 1000))
        if kind == "verify":
            back = min(back, n - 1)
            cache.seek(cache.offset - back, cache.limit)
            text = text[: len(text) - back]
            assert cache.offset.item() == len(text)
            cache.seek(len(text), len(text))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("window", [None, 8])
def test_quantized_rows_are_the_quantized_input(bits, window):
    cache = make_cache(window, bits=bits, group_size=32)
    mx.random.seed(1)
    for n in (5, 20, 1, 1):
        keys, values = mx.random.normal((2, 1, H, n, D))
        fetched, _ = cache.update_and_fetch(keys, values)
        packed, scales, biases = (part[..., -n:, :] for part in fetched)
        if n == 1 and window:  # a ring is not in order: find the row's slot
            slot = slice((cache.offset - 1) % cache.ring.slots, (cache.offset - 1) % cache.ring.slots + 1)
            packed, scales, biases = (part[..., slot, :] for part in fetched)
        back = mx.dequantize(packed, scales, biases, group_size=32, bits=bits)
        wanted = mx.dequantize(*mx.quantize(keys, group_size=32, bits=bits), group_size=32, bits=bits)
        assert mx.array_equal(back, wanted)
    assert cache.nbytes < make_like(cache, window).nbytes / (16 / bits) * 1.5


def make_like(cache, window):
    plain = make_cache(window)
    plain.update_and_fetch(*mx.zeros((2, 1, H, cache.offset, D)))
    return plain


def test_growth_is_geometric_and_in_whole_steps():
    cache, capacities = LinearKVCache(), set()
    for _ in range(400):
        cache.update_and_fetch(*mx.zeros((2, B, H, 64, D)))
        mx.eval(cache.parts)
        capacities.add(cache.capacity)
    assert all(c % STEP == 0 for c in capacities)
    assert max(capacities) <= 400 * 64 * 9 / 8 + STEP
    assert len(capacities) < 32
    cache.reserve(10**5)
    cache.update_and_fetch(*mx.zeros((2, B, H, STEP * 12, D)))
    assert cache.capacity == -(-(10**5) // STEP) * STEP


@pytest.mark.parametrize("window", [None, 4096])
@pytest.mark.parametrize("device_side", [False, True])
def test_writes_are_in_place(window, device_side):
    """Write one row into a large buffer; a second buffer is never allocated."""
    cache = make_cache(window)
    cache.update_and_fetch(*mx.zeros((2, 1, 8, 4000, 128)))
    mx.eval(cache.parts)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for _ in range(60):
        if device_side:
            cache.seek(mx.array([int(mx.array(cache.offset).item())]), 4090)
        keys, _ = cache.update_and_fetch(*mx.ones((2, 1, 8, 1, 128)))
        mx.eval(keys[..., :1, :], cache.parts)
        del keys
    assert mx.get_peak_memory() - before < cache.parts[0].nbytes / 4


def test_an_earlier_handle_keeps_the_old_contents():
    for device_side in (False, True):
        cache = make_cache(8)
        cache.update_and_fetch(*mx.zeros((2, 1, H, 5, D)))
        kept = cache.parts
        if device_side:
            cache.seek(mx.array([5]), 5)
        cache.update_and_fetch(*mx.ones((2, 1, H, 2, D)))
        assert not kept[0].any()
        assert cache.parts[0].any()


def test_layers_of_one_window_share_their_ring():
    caches = make_caches([8, None, 8, 16], starts=[0] * 4)
    assert caches[0].ring is caches[2].ring
    assert caches[0].ring is not caches[3].ring
    ring = Ring(8)
    offset = mx.array([3])
    assert ring.index(offset, 2) is ring.index(offset, 2)
    assert ring.index(mx.array([29 + ring.slots]), 2).flatten().tolist() == [29, 30]


def test_a_call_larger_than_a_ring_can_roll_back_is_refused():
    cache = make_cache(8)
    cache.seek(mx.array([0]), 0)
    with pytest.raises(AssertionError, match="more rows than a ring can take back"):
        cache.update_and_fetch(*mx.zeros((2, 1, H, CALL_ROWS + 1, D)))
