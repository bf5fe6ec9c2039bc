"""What attention asks of memory when it verifies, counted on the CPU: ours beside MLX's own kernel."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from ..emulator import Traffic

SHAPES = ((1, 4), (8, 4), (2, 12), (8, 12))  # queries, query heads of the KV head
POSITIONS, DIMS = 300, 128


def attention_table() -> "Table":
    """Bytes requested over distinct bytes of keys, values and queries; a few seconds."""
    from rich.table import Table

    table = Table(title=f"bytes requested / distinct bytes, attention to {POSITIONS} positions of {DIMS}, emulated")
    table.add_column("kernel", no_wrap=True)
    for name in ("q_len", "group", "keys", "values", "queries"):
        table.add_column(name, justify="right")
    for name, rows, group, traffic in _measured():
        cells = [f"{b.reread:.2f}x" for b in _buffers(traffic)] if traffic else ["not fused"] * 3
        table.add_row(name, str(rows), str(group), *cells, end_section=name != "MLX sdpa_vector")
    return table


def _buffers(traffic: "Traffic") -> list:
    x = "q" if "q" in traffic.buffers else "queries"
    return [traffic[name] for name in ("keys", "values", x)]


def _measured() -> Iterator[tuple[str, int, int, "Traffic | None"]]:
    """(kernel, queries, heads of a KV head, traffic; None where MLX has no such kernel)."""
    import mlx.core as mx

    from ..emulator import emulated
    from ..emulator.stock import sdpa_vector
    from ..emulator.stock_attention import fused
    from ..kernels import verify_attention

    kv, scale = mx.ones((1, 1, POSITIONS, DIMS), mx.float16), DIMS**-0.5
    for rows, group in SHAPES:
        q = mx.ones((1, group, rows, DIMS), mx.float16)
        stock = sdpa_vector(q, kv, kv, scale=scale, causal=rows > 1)[1] if fused(rows, group) else None
        yield "MLX sdpa_vector", rows, group, stock
        with emulated() as launches:
            verify_attention(q, kv, kv, mx.array([POSITIONS - rows]), scale=scale, limit=POSITIONS)
        yield "verify_attention", rows, group, launches[0]
