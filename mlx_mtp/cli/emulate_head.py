"""The table of `mlx-mtp emulate` for LM heads: what choosing tokens writes, beside MLX's product and argmax."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx
    from rich.table import Table

    from ..emulator import Traffic
    from ..kernels import Quantized

TOP = 20


def head_table(vocabulary: int = 1024, width: int = 512, rows: Sequence[int] = (1, 2, 4, 8)) -> "Table":
    """Counts for a 4-bit head (vocabulary, width) in bfloat16 at so many rows; both multiples of 64.

    Weights: bytes requested over distinct bytes. Written: by all launches. Read back: what a launch reads of what
    another one has written, MLX's argmax each logit once.
    """
    from rich.table import Table

    table = Table(title=f"tokens of a 4-bit ({vocabulary}, {width}) head, bfloat16, emulated")
    table.add_column("kernels", no_wrap=True)
    for name in ("M", "weights", "bytes written", "bytes read back"):
        table.add_column(name, justify="right")
    for name, measure in _measures(vocabulary, width):
        for m in rows:
            reread, written, read_back = measure(m)
            cells = (str(m), f"{reread:.2f}x", str(written), str(read_back))
            table.add_row(name if m == rows[0] else "", *cells, end_section=m == rows[-1])
    return table


def _measures(n: int, k: int) -> Iterator[tuple[str, Callable[[int], tuple[float, int, int]]]]:
    """(kernels, measurement at M rows)"""
    import mlx.core as mx

    from ..kernels import Quantized, verify_head, verify_head_draw, verify_head_top

    w, scales, biases = mx.quantize(mx.random.normal((n, k), mx.bfloat16, key=mx.random.key(0)), 64, 4)
    weights, key = Quantized(w, scales, biases, 64, 4, "affine", (n,)), mx.random.key(0)
    for kernel in ("qmv_fast", "qmv_wide"):
        yield f"MLX {kernel} + argmax", _stock(weights, kernel)
    yield "verify_head", _ours(lambda x: verify_head(x, weights), k)
    yield "verify_head_draw", _ours(lambda x: verify_head_draw(x, weights, key, 0, 1.0), k)
    yield f"verify_head_top, n = {TOP}", _ours(lambda x: verify_head_top(x, weights, TOP), k)


def _x(m: int, k: int) -> "mx.array":
    import mlx.core as mx

    return mx.random.normal((m, k), mx.bfloat16, key=mx.random.key(m))


def _stock(weights: "Quantized", kernel: str) -> Callable[[int], tuple[float, int, int]]:
    from ..emulator.stock import quantized_matvec

    def measure(m: int) -> tuple[float, int, int]:
        arrays = weights.w, weights.scales, weights.biases
        logits, traffic = quantized_matvec(_x(m, weights.k), *arrays, group_size=64, bits=4, kernel=kernel)
        tokens = 4 * m
        return traffic["w"].reread, _written(traffic) + tokens, logits.nbytes

    return measure


def _ours(op: "Callable[[mx.array], object]", k: int) -> Callable[[int], tuple[float, int, int]]:
    from ..emulator import emulated

    def measure(m: int) -> tuple[float, int, int]:
        with emulated() as launches:
            op(_x(m, k))
        tiles, merge = launches
        read_back = sum(merge[name].bytes_read for name in ("values", "indices"))
        return tiles["w"].reread, _written(tiles) + _written(merge), read_back

    return measure


def _written(traffic: "Traffic") -> int:
    return sum(b.bytes_written for b in traffic.buffers.values() if b.space == "output")
