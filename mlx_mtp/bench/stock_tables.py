"""Compare the emulated memory traffic of our kernels with that of MLX's own; a table for each kind of op."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
from rich.table import Column, Table

from .. import kernels
from ..emulator import Traffic, emulated
from ..emulator.stock import fused, gather_qmv, quantized_matvec, sdpa_vector, stock_kernels
from ..kernels import Experts, Quantized, Routing

Measure = Callable[[int], Sequence[str]]  # maps a number of rows M to cells of the table

# Buffers in the products' tables, with the kernels' names for them.
BUFFERS = {"weights": ("w", "keys"), "scales": ("scales",), "x": ("x", "queries")}

MATRIX = 64, 1024
LM_HEAD = 1024, 512  # vocabulary and hidden size
SHAPES = ((1, 4), (8, 4), (2, 12), (8, 12))  # of attention: queries, query heads per KV head
POSITIONS, DIMS = 300, 128

EXPERTS, TOP_K = 16, 4
HIDDEN, INNER, GROUP, BITS = 64, 32, 32, 4  # of the experts
WEIGHTS = ("gate", "up", "w")  # the experts' buffers in our launches

ROWS = (1, 2, 4, 8)  # of experts and the LM head
TOP = 20  # tokens of an LM head


def _counts_table(title: str, columns: Sequence[str], groups: Iterable[Iterable[Sequence[str]]]) -> Table:
    """Return a table of cells with a line below each group; the first column has the kernels' names."""
    figures = (Column(name, justify="right") for name in columns[1:])
    table = Table(Column(columns[0], no_wrap=True), *figures, title=title)
    for group in groups:
        for cells in group:
            table.add_row(*cells)
        table.add_section()
    return table


def _by_kernel(measures: Iterable[tuple[str, Measure]], rows: Sequence[int]) -> Iterator[list[list[str]]]:
    """Yield each kernel's group of rows of the table; its name is in the first row."""
    for kernel, measure in measures:
        yield [["" if i else kernel, str(m), *measure(m)] for i, m in enumerate(rows)]


def _launches(kernel: Callable[..., object], *args: Any, **options: Any) -> list[Traffic]:
    """Run a kernel in the emulator and return the memory traffic of each launch."""
    with emulated() as launches:
        kernel(*args, **options)
    return launches


def products_table(most: int) -> Table:
    """Return the table of bytes requested for 1 to `most` rows times a matrix.

    The matrix has 4 bits, for verify_gemv float32. By kind of buffer the bytes are over the distinct ones.
    """
    columns = ("kernel", "M", *BUFFERS, "KiB requested", "lines per access")
    title = f"bytes requested / distinct bytes, 4-bit {MATRIX}, emulated"
    table = _counts_table(title, columns, _by_kernel(_products(*MATRIX), range(1, most + 1)))
    touched = "lines of 64 bytes that 32 lanes of a simdgroup touch in one read of the weights"
    table.caption = f"lines per access: {touched}"
    return table


def _products(n: int, k: int) -> Iterator[tuple[str, Measure]]:
    """Yield (kernel's name, measure) for a 4-bit matrix (n, k), of verify_gemv dense: MLX's kernels and ours."""
    dense = mx.ones((n, k))
    whole = Quantized(*mx.quantize(dense, 64, 4), 64, 4, "affine", (n,))
    halves = Quantized(whole.w, whole.scales, whole.biases, 64, 4, "affine", (n // 2, n // 2 * 2))
    for name, traffic in stock_kernels(n, k).items():
        yield f"MLX {name}", lambda m, traffic=traffic: _product_cells(traffic(m))
        if name == "qmv_wide":
            yield "verify_qmm", partial(_product, kernels.verify_qmm, whole, k)
            yield "verify_glu", partial(_product, kernels.verify_glu, halves, k)
            yield "verify_qmm_mma", partial(_product, kernels.verify_qmm_mma, whole, k)
    yield "verify_gemv", partial(_product, kernels.verify_gemv, dense, k)


def _product(kernel: Callable[..., object], weights: Quantized | mx.array, k: int, m: int) -> list[str]:
    return _product_cells(*_launches(kernel, mx.ones((m, k)), weights))


def _product_cells(traffic: Traffic) -> list[str]:
    found = [next((traffic[name] for name in names if name in traffic.buffers), None) for names in BUFFERS.values()]
    reread = ["" if buffer is None else f"{buffer.reread:.2f}x" for buffer in found]
    lines = "" if found[0] is None else f"{found[0].lines_per_access:.1f}"
    return [*reread, f"{traffic.bytes_read / 1024:.0f}", lines]


def attention_table(most: int) -> Table:
    """Return the table of requested over distinct bytes of keys, values and queries, of at most `most` queries."""
    title = f"bytes requested / distinct bytes, attention to {POSITIONS} positions of {DIMS}, emulated"
    kv, scale, groups = mx.ones((1, 1, POSITIONS, DIMS), mx.float16), DIMS**-0.5, []
    for rows, group in (shape for shape in SHAPES if shape[0] <= most):
        q, stock = mx.ones((1, group, rows, DIMS), mx.float16), ["not fused"] * 3
        if fused(rows, group):
            stock = _reread(sdpa_vector(q, kv, kv, scale=scale, causal=rows > 1)[1], "keys", "values", "queries")
        offset = mx.array([POSITIONS - rows])
        launches = _launches(kernels.verify_attention, q, kv, kv, offset, scale=scale, limit=POSITIONS)
        cells = {"MLX sdpa_vector": stock, "verify_attention": _reread(launches[0], "keys", "values", "q")}
        groups.append([[kernel, str(rows), str(group), *found] for kernel, found in cells.items()])
    return _counts_table(title, ("kernel", "q_len", "group", "keys", "values", "queries"), groups)


def _reread(traffic: Traffic, *names: str) -> list[str]:
    return [f"{traffic[name].reread:.2f}x" for name in names]


def experts_table(most: int) -> Table:
    """Return the table of requests for the weights of experts at up to `most` rows, each with TOP_K experts."""
    columns = ("kernel", "M", "distinct experts / pairs", "launches", "weights", "KiB of weights")
    title = f"4-bit experts, {TOP_K} of {EXPERTS} for a row, emulated"
    drawn = [mx.quantize(mx.ones((EXPERTS, n, k)), GROUP, BITS) for n, k in ((INNER, HIDDEN), (HIDDEN, INNER))]
    up, down = (Quantized(*arrays, GROUP, BITS, "affine", arrays[0].shape[1:2]) for arrays in drawn)
    runs = {"MLX gather_qmv": _gathered, "verify_moe": _moe}
    measures = ((kernel, partial(_visits, run, Experts(up, up, down))) for kernel, run in runs.items())
    return _counts_table(title, columns, _by_kernel(measures, [m for m in ROWS if m <= most]))


def _visits(run: Callable[..., list[Traffic]], experts: Experts, m: int) -> list[str]:
    """Return a row's cells of the experts' table: what `run` launches and reads for the first m of 32 fixed rows."""
    logits = mx.random.normal((32, EXPERTS), key=mx.random.key(0))[:m]
    visited = mx.argsort(-logits, axis=-1)[:, :TOP_K].flatten()
    launches = run(experts, logits, visited)
    read = [launch[name] for launch in launches for name in WEIGHTS if name in launch.buffers]
    requested, distinct = sum(b.bytes_read for b in read), sum(b.distinct_read for b in read)
    pairs = f"{np.unique(visited).size} / {visited.size}"
    return [pairs, str(len(launches)), f"{requested / distinct:.2f}x", f"{requested / 1024:.0f}"]


def _gathered(experts: Experts, _logits: mx.array, visited: mx.array) -> list[Traffic]:
    """Return the traffic of MLX's three products (gate, up, down) for all pairs of a row and an expert."""
    assert experts.gate is not None
    rows, launches = mx.arange(visited.size), []
    for weights in (experts.gate, experts.up, experts.down):
        x, arrays = mx.ones((visited.size, 1, weights.k)), (weights.w, weights.scales, weights.biases)
        launches.append(gather_qmv(x, *arrays, rows, visited, group_size=GROUP, bits=BITS)[1])
    return launches


def _moe(experts: Experts, logits: mx.array, _visited: mx.array) -> list[Traffic]:
    x = mx.ones((len(logits), HIDDEN))
    return _launches(kernels.verify_moe, x, logits, experts, Routing("sigmoid", TOP_K))


def head_table(most: int) -> Table:
    """Return the table of bytes of a 4-bit LM head in bfloat16 at up to `most` rows.

    Weights: requested over distinct bytes. Written: by all launches. Read back: bytes that a launch reads of another
    launch's output; MLX's argmax reads each logit once.
    """
    title = f"tokens of a 4-bit {LM_HEAD} head, bfloat16, emulated"
    columns = ("kernels", "M", "weights", "bytes written", "bytes read back")
    return _counts_table(title, columns, _by_kernel(_lm_heads(*LM_HEAD), [m for m in ROWS if m <= most]))


def _lm_heads(n: int, k: int) -> Iterator[tuple[str, Measure]]:
    key = mx.random.key(0)
    weights = Quantized(*mx.quantize(mx.random.normal((n, k), mx.bfloat16, key=key), 64, 4), 64, 4, "affine", (n,))
    for kernel in ("qmv_fast", "qmv_wide"):
        yield f"MLX {kernel} + argmax", partial(_argmax, weights, kernel)
    yield "verify_head", partial(_chosen, kernels.verify_head, (weights,))
    yield "verify_head_draw", partial(_chosen, kernels.verify_head_draw, (weights, key, 0, 1.0))
    yield f"verify_head_top, n = {TOP}", partial(_chosen, kernels.verify_head_top, (weights, TOP))


def _hidden(m: int, k: int) -> mx.array:
    return mx.random.normal((m, k), mx.bfloat16, key=mx.random.key(m))


def _argmax(weights: Quantized, kernel: str, m: int) -> list[str]:
    arrays, tokens = (_hidden(m, weights.k), weights.w, weights.scales, weights.biases), 4 * m
    logits, traffic = quantized_matvec(*arrays, group_size=64, bits=4, kernel=kernel)
    return [*_reread(traffic, "w"), str(_written(traffic) + tokens), str(logits.nbytes)]


def _chosen(kernel: Callable[..., object], args: tuple[Any, ...], m: int) -> list[str]:
    tiles, merge = _launches(kernel, _hidden(m, args[0].k), *args)
    read_back = sum(merge[name].bytes_read for name in ("values", "indices"))
    return [*_reread(tiles, "w"), str(_written(tiles) + _written(merge)), str(read_back)]


def _written(traffic: Traffic) -> int:
    return sum(b.bytes_written for b in traffic.buffers.values() if b.space == "output")


# By op: its table, of at most the given number of rows.
TABLES = {"verify_attention": attention_table, "verify_moe": experts_table, "verify_head": head_table}
TABLES |= dict.fromkeys(("verify_qmm", "verify_glu", "verify_qmm_mma", "verify_gemv"), products_table)
