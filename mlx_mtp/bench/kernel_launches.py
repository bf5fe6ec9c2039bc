"""List small launches that cover every kernel text: each format, type and row count that a kernel is compiled for.

A group is a function that yields launches. Sizes that are part of a text (heads per KV head, head sizes, experts per
token, inner widths) are those of released models; all other sizes are small, so that a launch is cheap to run.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Any

import mlx.core as mx

from .. import kernels
from ..decoding.sampling import Sampling
from ..kernels import Experts, Gates, Quantized, RopeArguments, Routing
from ..kernels._quantized import BITS, GROUP_SIZES, lanes
from ..kernels._source import COMPILED_ROWS, DTYPES
from ..kernels.contraction import EXPLICIT, KERNELS, spelled

TimedLaunch = partial[object]
CodeFormat = tuple[str, int, int]
FORMATS: list[CodeFormat] = [
    (mode, b, size) for mode, bits in BITS.items() for b in bits for size in GROUP_SIZES[mode]
]
RELEASED: list[CodeFormat] = [("affine", 4, 64), ("affine", 8, 64)]  # the default formats of conversions
BLOCKS = [of for of in FORMATS if of[0] in kernels.BLOCK_FORMATS]  # those that conversions of GGUF files keep
AFFINE_ROWS = (1, 2, 4, 6, 8, 12)
TILES = (1, 64), (2, 64), (3, 64), (8, 64), (8, 4096), (16, 64), (16, 4096)  # rows of x and of weights, by matrices
WIDTHS = (128, 4096, 4224)  # of K: a quarter per lane, two packs per lane, one pack per lane
# (N, K, heads first) of latent attention's products per head.
PER_HEAD = ((512, 128, True), (128, 512, False), (512, 192, True))
# (experts, experts per token, inner width, hidden width): experts per token as in released models; of the widths it
# matters only whether they are multiples of 512.
MIXTURES = (
    *((16, 4, 128, 512), (16, 4, 512, 512), (16, 6, 704, 704), (16, 8, 512, 512), (16, 8, 704, 512)),
    *((16, 10, 512, 512), (32, 22, 704, 512)),
)
CHOSEN = (0, mx.int32), (4, mx.uint32), (64, mx.int32), (64, mx.uint32)  # positions per row of sparse attention
# (heads per KV head, head size of queries, of values) of released models
HEADS = ((4, 128, 128), (8, 128, 128), (12, 128, 128), (16, 128, 128), (16, 192, 128), (4, 256, 256), (6, 256, 256))
F32 = mx.float32


def spread(launches: Iterable[TimedLaunch], count: int) -> list[TimedLaunch]:
    """Return `count` (at least 2) of the launches, first to last in even steps; some repeat if there are fewer."""
    every = list(launches)
    return [every[i * (len(every) - 1) // (count - 1)] for i in range(count)]


@cache
def can_split(op: Callable[..., object]) -> bool:
    """Return whether an op has the option `split`, with which threads have fewer rows."""
    return "split" in inspect.signature(op).parameters


def alternatives(launches: Callable[[], Iterator[TimedLaunch]]) -> Iterator[TimedLaunch]:
    """Yield the launches, and then those that have it once more with `split=True`."""
    yield from launches()
    yield from (
        partial(launch, split=True)
        for launch in launches()
        if can_split(launch.func) and "matrix" not in launch.keywords
    )


def weights(of: CodeFormat, n: int, k: int, dtype: mx.Dtype, *before: int, ends: Sequence[int] = ()) -> Quantized:
    """Return quantized weights [*before, n, k] of zeros in a format (mode, bits, group size).

    ends: of stacked linears along n; by default one linear.
    """
    mode, bits, group = of
    affine, blocks = mode == "affine", kernels.BLOCK_FORMATS.get(mode)
    scales = mx.zeros((*before, n, k // group), dtype if affine else mx.uint8)
    if blocks:
        scales = mx.zeros((*before, n, k // blocks.span * blocks.words), mx.uint16)
    w = mx.zeros((*before, n, k * bits // 32), mx.uint32)
    return Quantized(w, scales, scales if affine else None, group, bits, mode, tuple(ends) or (n,))


def is_whole(of: CodeFormat, k: int) -> bool:
    """Return whether rows of k weights are whole groups, or blocks, of a format."""
    blocks = kernels.BLOCK_FORMATS.get(of[0])
    return k % (blocks.span if blocks else of[2]) == 0


def rows(m: int, k: int, dtype: mx.Dtype) -> mx.array:
    return mx.zeros((m, k), dtype)


def products(of: CodeFormat) -> Iterator[TimedLaunch]:
    """Yield launches of verify_qmm, verify_qmm_heads and verify_glu, for each number of lanes and values per lane."""
    by_lanes = {lanes(weights(of, 8, k, F32)): k for k in WIDTHS[::-1]}
    widths = [4096] if of[0] in kernels.BLOCK_FORMATS else by_lanes.values()  # blocks: one split for all widths
    for dtype, k, m in itertools.product(DTYPES, widths, AFFINE_ROWS):
        w, x = weights(of, 64, k, dtype), rows(m, k, dtype)
        bias = mx.zeros((64,), dtype)
        yield partial(kernels.verify_qmm, x, w)
        if m in (1, 8) or of in RELEASED:
            yield partial(kernels.verify_qmm, x, replace(w, bias=bias))
        if k == 4096:
            yield partial(kernels.verify_glu, x, weights(of, 64, k, dtype, ends=(32, 64)))
    per_head = [form for form in PER_HEAD[: None if of in RELEASED else 2] if is_whole(of, form[1])]
    for dtype, (n, k, first), m in itertools.product(DTYPES, per_head, AFFINE_ROWS):
        heads = weights(of, n, k, dtype, 2)
        yield partial(kernels.verify_qmm_heads, mx.zeros((1, m, 2, k), dtype), heads, heads_first=first)


def matrices(of: CodeFormat) -> Iterator[TimedLaunch]:
    """Yield launches of the lane `matrix`: matrix_qmm, matrix_glu, matrix_heads and matrix_head."""
    dtypes = DTYPES if of in RELEASED else (mx.bfloat16,)
    for dtype, (m, n), biased in itertools.product(dtypes, TILES, (False, True)):
        x, w = rows(m, 512, dtype), weights(of, n, 512, dtype)
        yield partial(kernels.matrix_qmm, x, replace(w, bias=mx.zeros((n,), dtype)) if biased else w)
        if not biased:
            yield partial(kernels.matrix_glu, x, weights(of, n, 512, dtype, ends=(n // 2, n)))
        per_head, heads = mx.zeros((1, m, 2, 512), dtype), weights(of, 64, 512, dtype, 2)
        yield partial(kernels.matrix_heads, per_head, heads, heads_first=biased)
        head, mask = weights(of, 4096, 512, dtype), mx.zeros((m, 128), mx.int32) if biased else None
        yield partial(kernels.verify_head, x, head, mask=mask, matrix=True)
        if m in (1, 8):
            yield partial(kernels.verify_head_top, x, head, 20 if biased else 1, matrix=True)


def dense_matrices() -> Iterator[TimedLaunch]:
    """Yield launches of matrix_gemv, and of matrix_head with unquantized weights."""
    for dtype, (m, n), biased in itertools.product(DTYPES, TILES, (False, True)):
        x, w = rows(m, 512, dtype), mx.zeros((n, 512), dtype)
        yield partial(kernels.matrix_gemv, x, w, mx.zeros((n,), dtype) if biased else None)
        head, mask = mx.zeros((4096, 512), dtype), mx.zeros((m, 128), mx.int32) if biased else None
        yield partial(kernels.verify_head, x, head, mask=mask, matrix=True)
        yield partial(kernels.verify_head_top, x, head, 20 if biased else 1, matrix=True)


def experts(of: CodeFormat) -> Iterator[TimedLaunch]:
    """Yield launches of moe_route, moe_glu or moe_relu2, and moe_down, together."""
    mixtures = MIXTURES if of in RELEASED else [next(sizes for sizes in MIXTURES if is_whole(of, sizes[2]))]
    sizes = (1, 4, 8, 16) if of in RELEASED else (1, 4, 8)
    for dtype, m, gated, (count, top, inner, k) in itertools.product(DTYPES, sizes, (True, False), mixtures):
        up, down = weights(of, inner, k, dtype, count), weights(of, k, inner, dtype, count)
        of_experts = Experts(up if gated else None, up, down)
        arguments = rows(m, k, dtype), mx.zeros((m, count), dtype), of_experts, Routing("sigmoid", top)
        yield partial(kernels.verify_moe, *arguments)


def heads(of: CodeFormat) -> Iterator[TimedLaunch]:
    """Yield launches of verify_head with verify_head_merge."""
    widths = (4096, 4224) if of in RELEASED else (4096,)
    for dtype, m, k in itertools.product(DTYPES, AFFINE_ROWS, widths):
        x, w = rows(m, k, dtype), weights(of, 1024, k, dtype)
        yield partial(kernels.verify_head, x, w)
        yield partial(kernels.verify_head, x, w, mask=mx.zeros((m, 32), mx.int32))
        if m in (1, 8) and k == 4096:
            yield partial(kernels.verify_head_top, x, w, 20 if m == 1 else 64)


def dense() -> Iterator[TimedLaunch]:
    """Yield launches of verify_gemv."""
    shapes = (3, 64), (64, 64), (8, 1024), (64, 512), (160, 2048), (128, 4096), (2048, 512), (4096, 512)
    for dtype, m, biased, (n, k) in itertools.product(DTYPES, (*COMPILED_ROWS, 5), (False, True), shapes):
        bias = mx.zeros((n,), dtype) if biased else None
        yield partial(kernels.verify_gemv, rows(m, k, dtype), mx.zeros((n, k), dtype), bias)


def dense_heads() -> Iterator[TimedLaunch]:
    """Yield launches of verify_dot, and of verify_head_dense with verify_head_merge."""
    for dtype, m, biased in itertools.product(DTYPES, (*COMPILED_ROWS, 5), (False, True)):
        yield partial(kernels.verify_gemv, rows(m, 512, dtype), mx.zeros((1, 512), dtype))
        if not biased:
            given = rows(m, 512, dtype), mx.zeros((1024, 512), dtype)
            yield partial(kernels.verify_head, *given, mask=mx.zeros((m, 32), mx.int32))
        for k, top in itertools.product((64, 512), (1, 20)):
            bias = mx.zeros((1024,), dtype) if biased else None
            yield partial(kernels.verify_head_top, rows(m, k, dtype), mx.zeros((1024, k), dtype), top, bias)


def routers() -> Iterator[TimedLaunch]:
    """Yield launches of moe_route."""
    for dtype, kind in itertools.product(DTYPES, ("softmax", "sigmoid")):
        for m, count, top in itertools.product((8, 16), (64, 128, 160, 256, 288, 384, 512), (8, 22)):
            for bias_dtype in dict.fromkeys((F32, dtype)) if kind == "sigmoid" else ():
                bias = mx.zeros((count,), bias_dtype)
                yield partial(kernels._routing.route_metal, mx.zeros((m, count), dtype), Routing(kind, top), bias)
            yield partial(kernels._routing.route_metal, mx.zeros((m, count), dtype), Routing(kind, top), None)


def choices() -> Iterator[TimedLaunch]:
    """Yield launches of choose_rows with every filter, and of change_logits with each kind of change."""
    options = Sampling(temp=1.0, top_p=0.9, min_p=0.01, min_tokens_to_keep=2, xtc_probability=1.0, top_k=2)
    for dtype, vocab_size in itertools.product(DTYPES, (64, 4096)):
        logits, key = mx.zeros((1, 2, vocab_size), dtype), mx.zeros((1, 2), mx.uint32)
        yield partial(kernels.choose_rows, logits, [options], key, mx.zeros((1,), mx.uint32))
        for bias, bans, masked, words in itertools.product((False, True), repeat=4):
            yield changing(logits, bias, bans, masked, words)


def probes() -> Iterator[TimedLaunch]:
    """Yield the launch of matrix_order."""
    yield partial(kernels.matrix_order.matrix_sums)


def changing(logits: mx.array, bias: bool, bans: bool, masked: bool, words: bool) -> TimedLaunch:
    """Return a launch of change_logits for logits [1, R, V], with these kinds of changes."""
    n, rows, vocab_size = logits.shape
    bits, bytes_ = mx.zeros((n, max(2, rows), vocab_size // 32), mx.int32), mx.zeros((8,), mx.uint8)
    ranks = mx.zeros((vocab_size,), mx.int32), mx.zeros((vocab_size + 1,), mx.int32)
    texts = kernels.Words(mx.zeros((n, 1, 4), mx.int32), bytes_, *ranks, bytes_) if words else None
    own = mx.zeros((n, vocab_size)) if bias else None, bits[:, :2] if bans else None
    changes = kernels.Changes(mx.zeros((n, 3)), mx.zeros((n, 3), mx.int32), *own, texts)
    tails = mx.zeros((n, 8), mx.uint8), mx.zeros((n,), mx.int32)
    context, drafts = mx.zeros((n, 8), mx.int32), mx.zeros((n, rows - 1), mx.int32)
    paths = kernels.Paths(context, drafts, mx.zeros((n,), mx.int32), *tails)
    return partial(kernels.change_logits, logits, changes, paths, bits[:, :rows] if masked else None)


def attention(dtype: mx.Dtype) -> Iterator[TimedLaunch]:
    """Yield launches of verify_attention with attention_merge: in chunks, with windows and sinks, quantized."""
    sizes = (64, 64), (128, 128), (192, 128), (256, 256), (512, 512)
    forms = dict.fromkeys([(group, *size) for size in sizes for group in (1, 8)] + [*HEADS])
    for (group, d, dv), bits, m in itertools.product(forms, (None, 8, 4), COMPILED_ROWS):
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


def latent() -> Iterator[TimedLaunch]:
    """Yield launches of latent_scores, latent_values and attention_merge, together."""
    widths = (512, 64), (256, 32), (96, 8)
    for dtype, (dv, dr), heads_, m, (many, index) in itertools.product(DTYPES, widths, (8, 128), (1, 4, 8), CHOSEN):
        queries = (mx.zeros((1, heads_, m, width), dtype) for width in (dv, dr))
        keys = (mx.zeros((1, 1, 64, width), dtype) for width in (dv, dr))
        chosen = mx.zeros((m, many), index) if many else None
        more = {"scale": 1.0, "limit": 64, "chosen": chosen}
        yield partial(kernels.verify_latent_attention, *queries, *keys, mx.array([8]), **more)


def norms() -> Iterator[TimedLaunch]:
    """Yield launches of add_norm, gated_norm and norm_rope."""
    for dtype, of_weight in itertools.product(DTYPES, DTYPES):
        for width in (512, 4100, 12288, 16384):
            x = rows(2, width, dtype)
            yield partial(kernels.add_norm, x, x, mx.zeros((width,), of_weight), 1e-6)
        for d, strided in itertools.product((128, 256), (False, True)):
            y = mx.zeros((1, 2, 4, d), dtype)
            z = mx.zeros((1, 2, 8, d), of_weight)[:, :, ::2] if strided else mx.zeros((1, 2, 4, d), of_weight)
            weight = mx.zeros((d,), of_weight)
            yield partial(kernels.gated_norm, y, z, weight, 1e-6)
            for rope in (RopeArguments(64, base=1e4), RopeArguments(64, freqs=mx.zeros((32,)))):
                yield partial(kernels.norm_rope, y, y, 3, rope, q_weight=weight, k_weight=weight, eps=1e-6)
                yield partial(kernels.norm_rope, y, y, mx.array([3]), rope)


def recurrences() -> Iterator[TimedLaunch]:
    """Yield launches of delta_inputs, gated_delta_verify and mamba2_verify."""
    for dtype, other in itertools.product(DTYPES, DTYPES):
        for d in (128, 196):
            for keys, values in ((2, 2), (4, 8)):
                width = (2 * keys + values) * d
                x, before = mx.zeros((1, 2, width), dtype), mx.zeros((1, 3, width), dtype)
                gates = Gates(*(mx.zeros((1, 2, values), other),) * 2, *(mx.zeros((values,), dtype),) * 2)
                weight = mx.zeros((width, 4, 1), dtype)
                yield partial(kernels.delta_inputs, x, before, weight, gates, key_heads=keys, head_dim=d)
        for dk, dv, gate in itertools.product((64, 128), (8, 12), ((), (1,))):
            q, v = mx.zeros((1, 2, 2, dk), dtype), mx.zeros((1, 2, 4, dv), dtype)
            g, beta = mx.zeros((1, 2, 4, *(dk for _ in gate)), other), mx.zeros((1, 2, 4), dtype)
            state = mx.zeros((1, 4, dv, dk))
            yield partial(kernels.gated_delta_verify, q, (q, v, g, beta), state)
        for size, count in itertools.product((64, 128), (4, 8)):
            x, b = mx.zeros((1, 2, count, 8), dtype), mx.zeros((1, 2, 2, size), dtype)
            arguments = b, (x, b, mx.zeros((1, 2, count))), mx.zeros((1, count, 8, size)), mx.zeros((count,), other)
            yield partial(kernels.mamba2_verify, *arguments, mx.zeros((count,), dtype))


def spellings() -> Iterator[TimedLaunch]:
    """Yield a sample of launches of the kernels with MLX's own sums, in each explicit spelling of multiply-adds."""
    makers = [partial(make, ("affine", 4, 64)) for make in (products, experts, heads)]
    for make, spelling in itertools.product((*makers, dense, dense_heads, norms, recurrences), EXPLICIT):
        for launch in spread(make(), 12):
            yield partial(launched, launch, spelling)


def launched(launch: TimedLaunch, spelling: str) -> None:
    with ExitStack() as stack:
        for op in KERNELS:
            stack.enter_context(spelled(op, spelling))
        launch()


def groups(formats: Sequence[CodeFormat]) -> dict[str, Callable[[], Iterator[TimedLaunch]]]:
    """Return the groups by name, as functions that yield launches, with splits; of quantized weights per format."""
    quantized = [(make, of) for make, of in itertools.product((products, matrices, experts, heads), formats)]
    found: dict[str, Callable[[], Iterator[TimedLaunch]]] = {
        **{f"{make.__name__} {'-'.join(map(str, of))}": partial(make, of) for make, of in quantized},
        **{f"attention {dtype}": partial(attention, dtype) for dtype in DTYPES},
        **{make.__name__: make for make in (dense, dense_heads, dense_matrices, routers, choices, probes)},
        **{make.__name__: make for make in (latent, norms, recurrences, spellings)},
    }
    return {name: partial(alternatives, make) for name, make in found.items()}
