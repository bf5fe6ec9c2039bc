"""Collect the texts of all kernels: each op in every format, type and number of rows that it is compiled for.

A group is a function that lists launches; arrays are never evaluated, so they may be of any size.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from exact import DTYPES, FORMATS

from mlx_mtp import kernels
from mlx_mtp.emulator.texts import LaunchText, collected
from mlx_mtp.kernels import Experts, Gates, Quantized, Rope, Routing
from mlx_mtp.kernels._quantized import lanes
from mlx_mtp.kernels._source import COMPILED_ROWS

Launch = Callable[..., object]
Format = tuple[str, int, int]
AFFINE_ROWS = (1, 2, 4, 6, 8, 12)
WIDTHS = (128, 4096, 4224)  # of K: a quarter of it to each of four lanes, two packs to a lane, one
F32 = mx.float32


def some(launches: Iterator[Launch], few: int | None = None) -> list[Launch]:
    """Return all launches, or a `few`, from the first to the last in even steps."""
    chosen = list(launches)
    return chosen if few is None else [chosen[i * (len(chosen) - 1) // (few - 1)] for i in range(few)]


def launched(launch: Launch, **more: Any) -> list[LaunchText]:
    """Return the texts of one launch, called with `more` arguments."""
    with collected() as found:
        partial(launch, **more)()
    return found


def texts(launches: Iterator[Launch], few: int | None = None) -> list[LaunchText]:
    """Return the different texts of launches, or of a `few`."""
    return list(dict.fromkeys(text for launch in some(launches, few) for text in launched(launch)))


def weights(of: Format, n: int, k: int, dtype: mx.Dtype, *before: int, ends: Sequence[int] = ()) -> Quantized:
    """Make weights [*before, n, k] of zeros."""
    mode, bits, group = of
    affine = mode == "affine"
    scales = mx.zeros((*before, n, k // group), dtype if affine else mx.uint8)
    w = mx.zeros((*before, n, k * bits // 32), mx.uint32)
    return Quantized(w, scales, scales if affine else None, group, bits, mode, tuple(ends) or (n,))


def rows(m: int, k: int, dtype: mx.Dtype) -> mx.array:
    return mx.zeros((m, k), dtype)


def products(of: Format) -> Iterator[Launch]:
    """verify_qmm, its heads and verify_glu: one of each number of lanes and values."""
    widths = {lanes(weights(of, 8, k, F32)): k for k in WIDTHS[::-1]}.values()
    for dtype, k, m in itertools.product(DTYPES, widths, AFFINE_ROWS):
        w, x = weights(of, 64, k, dtype), rows(m, k, dtype)
        bias = mx.zeros((64,), dtype)
        yield partial(kernels.verify_qmm, x, w)
        if m in (1, 8):
            yield partial(kernels.verify_qmm, x, Quantized(**{**vars(w), "bias": bias}))
        if k == 4096:
            yield partial(kernels.verify_glu, x, weights(of, 64, k, dtype, ends=(32, 64)))
            heads = weights(of, 64, k, dtype, 2)
            yield partial(kernels.verify_qmm_heads, mx.zeros((1, m, 2, k), dtype), heads, heads_first=m % 4 == 0)


def matrices(of: Format) -> Iterator[Launch]:
    """verify_qmm_mma."""
    for dtype, n, m in itertools.product(DTYPES, (64, 2048), (8, 16)):
        yield partial(kernels.verify_qmm_mma, rows(m, 512, dtype), weights(of, n, 512, dtype))


def experts(of: Format) -> Iterator[Launch]:
    """moe_glu, moe_relu2 and moe_down."""
    for dtype, m, gated in itertools.product(DTYPES, (1, 4, 8), (True, False)):
        up, down = weights(of, 128, 512, dtype, 16), weights(of, 512, 128, dtype, 16)
        of_experts = Experts(up if gated else None, up, down)
        arguments = rows(m, 512, dtype), mx.zeros((m, 16), dtype), of_experts, Routing("sigmoid", 4)
        yield partial(kernels.verify_moe, *arguments)


def heads(of: Format) -> Iterator[Launch]:
    """verify_head and verify_head_merge."""
    for dtype, m in itertools.product(DTYPES, AFFINE_ROWS):
        x, w = rows(m, 4096, dtype), weights(of, 1024, 4096, dtype)
        yield partial(kernels.verify_head, x, w)
        if m in (1, 8):
            yield partial(kernels.verify_head_top, x, w, 20 if m == 1 else 64)


def dense() -> Iterator[Launch]:
    """verify_gemv."""
    shapes = (3, 64), (64, 64), (8, 1024), (64, 512), (160, 2048), (2048, 512), (4096, 512)
    for dtype, m, biased, (n, k) in itertools.product(DTYPES, (*COMPILED_ROWS, 5), (False, True), shapes):
        bias = mx.zeros((n,), dtype) if biased else None
        yield partial(kernels.verify_gemv, rows(m, k, dtype), mx.zeros((n, k), dtype), bias)


def dense_heads() -> Iterator[Launch]:
    """verify_head_dense and verify_dot."""
    for dtype, m, biased in itertools.product(DTYPES, (*COMPILED_ROWS, 5), (False, True)):
        yield partial(kernels.verify_gemv, rows(m, 512, dtype), mx.zeros((1, 512), dtype))
        for k, top in itertools.product((64, 512), (1, 20)):
            bias = mx.zeros((1024,), dtype) if biased else None
            yield partial(kernels.verify_head_top, rows(m, k, dtype), mx.zeros((1024, k), dtype), top, bias)


def routers() -> Iterator[Launch]:
    """moe_route and draw_top."""
    for dtype, kind, biased in itertools.product(DTYPES, ("softmax", "sigmoid"), (False, True)):
        for m, count in itertools.product((8, 16), (64, 160, 288, 512)):
            bias = mx.zeros((count,)) if biased and kind == "sigmoid" else None
            yield partial(kernels._routing.route_metal, mx.zeros((m, count), dtype), Routing(kind, 8), bias)
    top = mx.zeros((2, 8)), mx.zeros((2, 8), mx.int32), mx.zeros((2,))
    yield partial(kernels.draw_top, top, mx.zeros((2,), mx.uint32), 3, temp=1.0, vocab_size=64)


def attention(dtype: mx.Dtype) -> Iterator[Launch]:
    """verify_attention and attention_merge: in chunks, windows, quantized, of several texts."""
    widths = (64, 64), (128, 128), (192, 128), (256, 256), (512, 512)
    for (d, dv), bits, group, m in itertools.product(widths, (None, 8, 4), (1, 8), COMPILED_ROWS[:5]):
        for size in (64,) if bits is None or (d, group) != (128, 8) else (32, 64, 128):
            q = mx.zeros((1, 2 * group, m, d), dtype)
            k, v = (cached((1, 2, 64, width), dtype, bits, size) for width in (d, dv))
            more: dict[str, Any] = (
                {"sinks": mx.zeros((2 * group,), dtype)} if m == 1 else {"window": 32 if m == 2 else None}
            )
            yield partial(
                kernels.verify_attention,
                q,
                k,
                v,
                mx.array([8]),
                scale=1.0,
                limit=64,
                group_size=size,
                bits=bits,
                **more,
            )


def cached(shape: Sequence[int], dtype: mx.Dtype, bits: int | None, size: int) -> Any:
    if bits is None:
        return mx.zeros(shape, dtype)
    scales = mx.zeros((*shape[:-1], shape[-1] // size), dtype)
    return mx.zeros((*shape[:-1], shape[-1] * bits // 32), mx.uint32), scales, scales


def latent() -> Iterator[Launch]:
    """latent_scores and latent_values."""
    widths = (512, 64), (256, 32), (96, 8)
    for dtype, (dv, dr), heads_, m, many in itertools.product(DTYPES, widths, (8, 128), (1, 4), (None, 4, 64)):
        queries = (mx.zeros((1, heads_, m, width), dtype) for width in (dv, dr))
        keys = (mx.zeros((1, 1, 64, width), dtype) for width in (dv, dr))
        chosen = None if many is None else mx.zeros((m, many), mx.uint32)
        more = {"scale": 1.0, "limit": 64, "chosen": chosen}
        yield partial(kernels.verify_latent_attention, *queries, *keys, mx.array([8]), **more)


def norms() -> Iterator[Launch]:
    """add_norm, gated_norm and norm_rope."""
    for dtype, of_weight in itertools.product(DTYPES, DTYPES):
        for width in (512, 4100, 12288):
            x = rows(2, width, dtype)
            yield partial(kernels.add_norm, x, x, mx.zeros((width,), of_weight), 1e-6)
        for d, strided in itertools.product((128, 256), (False, True)):
            y = mx.zeros((1, 2, 4, d), dtype)
            z = mx.zeros((1, 2, 8, d), of_weight)[:, :, ::2] if strided else mx.zeros((1, 2, 4, d), of_weight)
            weight = mx.zeros((d,), of_weight)
            yield partial(kernels.gated_norm, y, z, weight, 1e-6)
            for rope in (Rope(64, base=1e4), Rope(64, freqs=mx.zeros((32,)))):
                yield partial(kernels.norm_rope, y, y, 3, rope, q_weight=weight, k_weight=weight, eps=1e-6)
                yield partial(kernels.norm_rope, y, y, mx.array([3]), rope)


def recurrences() -> Iterator[Launch]:
    """delta_inputs, gated_delta_verify and mamba2_verify."""
    for dtype, other in itertools.product(DTYPES, DTYPES):
        for d in (128, 196):
            x, before = mx.zeros((1, 2, 6 * d), dtype), mx.zeros((1, 3, 6 * d), dtype)
            gates = Gates(*(mx.zeros((1, 2, 4), other),) * 2, *(mx.zeros((4,), dtype),) * 2)
            weight = mx.zeros((6 * d, 4, 1), dtype)
            yield partial(kernels.delta_inputs, x, before, weight, gates, key_heads=2, head_dim=d)
        for dk, dv, gate in itertools.product((64, 128), (8, 12), ((), (1,))):
            q, v = mx.zeros((1, 2, 2, dk), dtype), mx.zeros((1, 2, 4, dv), dtype)
            g, beta = mx.zeros((1, 2, 4, *(dk for _ in gate)), other), mx.zeros((1, 2, 4), dtype)
            state = mx.zeros((1, 4, dv, dk))
            yield partial(kernels.gated_delta_verify, q, (q, v, g, beta), state)
        for size in (64, 128):
            x, b = mx.zeros((1, 2, 4, 8), dtype), mx.zeros((1, 2, 2, size), dtype)
            arguments = b, (x, b, mx.zeros((1, 2, 4))), mx.zeros((1, 4, 8, size)), mx.zeros((4,), other)
            yield partial(kernels.mamba2_verify, *arguments, mx.zeros((4,), dtype))


GROUPS: dict[str, Callable[[], Iterator[Launch]]] = {
    **{f"{make.__name__} {'-'.join(map(str, of))}": partial(make, of)
       for make, of in itertools.product((products, matrices, experts, heads), FORMATS)},
    **{f"attention {dtype}": partial(attention, dtype) for dtype in DTYPES},
    **{make.__name__: make for make in (dense, dense_heads, routers, latent, norms, recurrences)},
}  # fmt: skip
# Launches of each group that stand for all: every op, and each of the three types.
FEW = {
    "products affine-4-64": 6,
    "products affine-3-32": 3,
    "products mxfp8-8-32": 3,
    "products nvfp4-4-16": 3,
    "matrices affine-6-128": 3,
    "matrices mxfp4-4-32": 2,
    "experts affine-5-64": 4,
    "experts nvfp4-4-16": 2,
    "heads affine-8-64": 3,
    "heads mxfp4-4-32": 2,
    "attention mlx.core.bfloat16": 4,
    "attention mlx.core.float32": 2,
    "attention mlx.core.float16": 2,
    "dense": 4,
    "dense_heads": 4,
    "routers": 4,
    "latent": 6,
    "norms": 9,
    "recurrences": 9,
}
