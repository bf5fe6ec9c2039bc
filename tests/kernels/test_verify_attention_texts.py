"""Compare attention of several sequences, in slots of one buffer, with that of each alone."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import pytest
from exact import DTYPES, same_bits
from metal_cases import exact, linux_only, relative_error
from sweep import SWEEP, sampled, sweep

from mlx_mtp import emulator
from mlx_mtp.kernels import verify_attention, verify_attention_ref

pytestmark = linux_only
HKV, HQ, D, SLOTS = 2, 6, 32, 10


@dataclass
class Texts:
    """Queries, buffers of SLOTS slots with NaN outside of the sequences, and each sequence's own arguments."""

    q: mx.array
    buffers: list[Any]
    offset: mx.array
    cache_rows: mx.array
    more: dict[str, Any]

    def attended(self, op=verify_attention, rows=slice(None), **less: Any) -> mx.array:
        own = {n: a[rows] if n in ("start", "gate") and isinstance(a, mx.array) else a for n, a in self.more.items()}
        given = {"scale": 0.2, **own, **less}
        if op is verify_attention:
            given["limit"] = int(self.offset[rows].max()) + self.q.shape[2]
        return op(self.q[rows], *self.buffers, self.offset[rows], cache_rows=self.cache_rows[rows], **given)


def drawn(lengths: list[int], rows: int, dtype: mx.Dtype, *, capacity: int, bits: int | None = None, **more) -> Texts:
    """Return sequences of these lengths with `rows` queries each, in slots in any order, some of them free."""
    mx.random.seed(sum(lengths))
    slots = [9, 0, 4, 7, 1, 3, 8, 5][: len(lengths)]
    buffers = []
    for _ in range(2):
        buffer = mx.random.normal((SLOTS, HKV, capacity, D)).astype(dtype)
        if bits is None:
            held = mx.array([lengths[slots.index(s)] if s in slots else 0 for s in range(SLOTS)])
            buffer = mx.where(mx.arange(capacity)[:, None] < held.reshape(-1, 1, 1, 1), buffer, float("nan"))
        buffers.append(buffer if bits is None else mx.quantize(buffer, 32, bits))
    if bits is not None:
        more |= {"bits": bits, "group_size": 32}
    q = mx.random.normal((len(lengths), HQ, rows, D)).astype(dtype)
    return Texts(q, buffers, mx.array(lengths) - rows, mx.array(slots), more)


LENGTHS = [3, 1100, 64, 257, 5, 90, 33, 600] if SWEEP else [3, 300, 64, 257, 5, 90, 33, 100]


def assert_each_is_as_alone(texts: Texts) -> emulator.Traffic:
    with emulator.emulated() as launches:
        y = texts.attended()
    assert [launch.kernel for launch in launches] == ["verify_attention", "attention_merge"]
    with emulator.emulated(emulator.Options(traffic=False)):
        alone = [texts.attended(rows=slice(i, i + 1)) for i in range(len(y))]
    assert same_bits(y, mx.concatenate(alone))
    rounding = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}[y.dtype]
    assert relative_error(y, exact(texts.attended(verify_attention_ref))) < rounding
    return launches[0]


def assert_eight_texts(dtype):
    gate = mx.random.normal((8, 2, HQ, D), key=mx.random.key(1)).astype(dtype)
    start = mx.array([0, 7, 0, 200, 4, 0, 0, 31])
    traffic = assert_each_is_as_alone(drawn(LENGTHS, 2, dtype, capacity=max(LENGTHS) + 20, gate=gate, start=start))
    seen = sum(length - min(begin, length - 2) for length, begin in zip(LENGTHS, start.tolist(), strict=True))
    for name in ("keys", "values"):
        assert traffic[name].reread == 1.0
        assert traffic[name].bytes_read == seen * HKV * D * dtype.size


def test_eight_texts_of_different_length_read_their_slots_once():
    assert_eight_texts(mx.bfloat16)


@sweep
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_eight_texts_of_any_type(dtype):
    assert_eight_texts(dtype)


@pytest.mark.parametrize(("window", "bits"), sampled([(40, None)], [(40, None), (None, 8), (None, 4)]))
def test_windows_and_quantized_caches(window, bits):
    """Rings that are not yet full, just full, and have wrapped."""
    lengths = [9, 48, 49, 700] if window else [9, 48, 49, 100]
    sinks = mx.random.normal((HQ,), key=mx.random.key(2))
    texts = drawn(lengths, 2, mx.bfloat16, capacity=48 if window else 128, bits=bits, window=window, sinks=sinks)
    assert_each_is_as_alone(texts)


def test_numbers_of_texts_that_do_not_fit():
    texts = drawn([5, 6], 2, mx.float32, capacity=8)
    with pytest.raises(ValueError, match=r"start has shape \(3,\); 2 sequences need \(2,\)"):
        texts.attended(start=mx.zeros(3, mx.int32))
    texts.cache_rows = mx.array([1])
    with pytest.raises(ValueError, match=r"cache_rows has shape \(1,\); 2 sequences need \(2,\)"):
        texts.attended()
    with pytest.raises(ValueError, match=r"q has shape .*; each sequence needs a cache, and each KV head a whole"):
        verify_attention(texts.q, *texts.buffers, texts.offset, scale=1.0, limit=9)
