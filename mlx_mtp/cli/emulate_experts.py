"""What a layer's experts ask of memory, counted on the CPU: `verify_moe` beside MLX's `gather_qmv`."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import mlx.core as mx
    from rich.table import Table

    from ..emulator import Traffic
    from ..kernels import Experts

HIDDEN, INNER, GROUP, BITS = 64, 32, 32, 4
WEIGHTS = ("gate", "up", "w")  # the weights' buffers in launches of ours


def experts_table(rows: Sequence[int] = (1, 2, 4, 8), experts: int = 16, top_k: int = 4) -> "Table":
    """Requests of the experts' weights at so many rows, each visiting `top_k` of `experts`; counts, not times."""
    import numpy as np
    from rich.table import Table

    table = Table(title=f"4-bit experts, {top_k} of {experts} for a row, emulated")
    table.add_column("kernel", no_wrap=True)
    for name in ("M", "distinct experts / pairs", "launches", "weights", "KiB of weights"):
        table.add_column(name, justify="right")
    made = _experts(experts)
    for kernel, measure in (("MLX gather_qmv", _mlx), ("verify_moe", _ours)):
        for m in rows:
            visited, launches = measure(_logits(m, experts), made, top_k)
            cells = (f"{np.unique(visited).size} / {visited.size}", *_cells(launches))
            table.add_row(kernel if m == rows[0] else "", str(m), *cells, end_section=m == rows[-1])
    return table


def _experts(count: int) -> "Experts":
    import mlx.core as mx

    from ..kernels import Experts, Quantized

    def weights(n: int, k: int) -> Quantized:
        return Quantized(*mx.quantize(mx.ones((count, n, k)), GROUP, BITS), GROUP, BITS, "affine", (n,))

    return Experts(weights(INNER, HIDDEN), weights(INNER, HIDDEN), weights(HIDDEN, INNER))


def _logits(m: int, experts: int) -> "mx.array":
    """The first m rows of the same ones."""
    import mlx.core as mx

    return mx.random.normal((32, experts), key=mx.random.key(0))[:m]


def _mlx(logits: "mx.array", experts: "Experts", top_k: int) -> tuple["mx.array", list["Traffic"]]:
    """MLX's three products, one pair at a time."""
    import mlx.core as mx

    from ..emulator.stock import gather_qmv

    visited = mx.argsort(-logits, axis=-1)[:, :top_k].flatten()
    rows = mx.arange(visited.size)
    launches = []
    for weights in (experts.gate, experts.up, experts.down):
        x, arrays = mx.ones((visited.size, 1, weights.k)), (weights.w, weights.scales, weights.biases)
        launches.append(gather_qmv(x, *arrays, rows, visited, group_size=GROUP, bits=BITS)[1])
    return visited, launches


def _ours(logits: "mx.array", experts: "Experts", top_k: int) -> tuple["mx.array", list["Traffic"]]:
    import mlx.core as mx

    from ..emulator import emulated
    from ..kernels import Routing, verify_moe

    visited = mx.argsort(-logits, axis=-1)[:, :top_k].flatten()
    with emulated() as launches:
        verify_moe(mx.ones((logits.shape[0], HIDDEN)), logits, experts, Routing("sigmoid", top_k))
    return visited, launches


def _weights(launches: Sequence["Traffic"]) -> Iterator[tuple[int, int]]:
    """(bytes requested, distinct bytes) of each buffer of weights."""
    for launch in launches:
        for name in WEIGHTS:
            if name in launch.buffers:
                yield launch[name].bytes_read, launch[name].distinct_read


def _cells(launches: Sequence["Traffic"]) -> tuple[str, str, str]:
    requested, distinct = (sum(column) for column in zip(*_weights(launches), strict=True))
    return str(len(launches)), f"{requested / distinct:.2f}x", f"{requested / 1024:.0f}"
