"""`mlx-mtp emulate`: what Metal kernels ask of memory, counted on the CPU."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    import mlx.core as mx
    from rich.table import Table

    from ..emulator import Traffic

    Op = Callable[[mx.array], object]

# The buffers whose traffic tells kernels apart, by the names that the kernels give them.
COLUMNS = {"weights": ("w", "keys"), "scales": ("scales",), "x": ("x", "queries")}


TABLES = ("products", "attention", "experts", "head")


@click.command()
@click.option("--of", "tables", type=click.Choice(TABLES), multiple=True, help="Only this table; may be repeated.")
@click.option("--stock", is_flag=True, help="Only MLX's own kernels for products, from the installed wheel.")
@click.option(
    "--shape",
    nargs=2,
    type=click.IntRange(min=64),
    default=(64, 1024),
    help="Rows and columns of the products' matrix.",
)
@click.option("--rows", type=click.IntRange(1, 32), default=8, help="Most rows M of the verify.")
def emulate(tables: tuple[str, ...], stock: bool, shape: tuple[int, int], rows: int) -> None:
    """Count the memory traffic of Metal kernels at M = 1, 2, ... rows, without a GPU: ours beside MLX's own.

    Counts, not times: of products with a matrix, attention, a mixture of experts, and an LM head.
    """
    from rich.console import Console

    if shape[1] % 64:
        raise click.BadParameter(
            f"{shape[1]} columns; must be a multiple of 64, the group of the scales", param_hint="--shape"
        )
    console = Console()
    for name in ("products",) if stock else tables or TABLES:
        console.print(_products(stock, shape, rows) if name == "products" else table_of(name))


def table_of(name: str) -> "Table":
    """One of TABLES, in its usual shape."""
    from .emulate_attention import attention_table
    from .emulate_experts import experts_table
    from .emulate_head import head_table

    made = {"attention": attention_table, "experts": experts_table, "head": head_table}
    return _products(False, (64, 1024), 8) if name == "products" else made[name]()


def _products(stock: bool, shape: tuple[int, int], rows: int) -> "Table":
    from rich.table import Table

    table = Table(
        title=f"bytes requested / distinct bytes, 4-bit ({shape[0]}, {shape[1]}), emulated",
        caption="lines per access: lines of 64 bytes that 32 lanes of a simdgroup touch in one read of the weights",
    )
    table.add_column("kernel", no_wrap=True)
    table.add_column("M", justify="right")
    for name in (*COLUMNS, "KiB requested", "lines per access"):
        table.add_column(name, justify="right")
    for kernel, measure in _kernels(stock, *shape):
        for m in range(1, rows + 1):
            table.add_row(kernel if m == 1 else "", str(m), *_cells(measure(m)), end_section=m == rows)
    return table


def _kernels(stock: bool, n: int, k: int) -> Iterator[tuple[str, "Callable[[int], Traffic]"]]:
    """(name, traffic at M rows): MLX's kernels, and ours behind the ones whose bits they have."""
    from ..emulator.stock import stock_kernels

    ours = {} if stock else _ours(n, k)
    for name, measure in stock_kernels(n, k).items():
        yield f"MLX {name}", measure
        yield from ours.pop(name, {}).items()
    for kernels in ours.values():
        yield from kernels.items()


def _ours(n: int, k: int) -> dict[str, dict[str, "Callable[[int], Traffic]"]]:
    """Our kernels by the one of MLX's that they stand beside: products with a 4-bit, or an unquantized, (n, k)."""
    import mlx.core as mx

    from ..kernels import Quantized, verify_gemv, verify_glu, verify_qmm, verify_qmm_mma

    dense = mx.ones((n, k))
    whole = Quantized(*mx.quantize(dense, 64, 4), 64, 4, "affine", (n,))
    halves = Quantized(whole.w, whole.scales, whole.biases, 64, 4, "affine", (n // 2, n // 2 * 2))
    return {
        "qmv_wide": {
            "verify_qmm": _traffic(lambda x: verify_qmm(x, whole), k),
            "verify_glu": _traffic(lambda x: verify_glu(x, halves), k),
            "verify_qmm_mma": _traffic(lambda x: verify_qmm_mma(x, whole), k),
        },
        "": {"verify_gemv": _traffic(lambda x: verify_gemv(x, dense), k)},
    }


def _traffic(op: "Op", k: int) -> "Callable[[int], Traffic]":
    import mlx.core as mx

    from ..emulator import emulated

    def measure(m: int) -> "Traffic":
        with emulated() as launches:
            op(mx.ones((m, k)))
        (traffic,) = launches
        return traffic

    return measure


def _cells(traffic: "Traffic") -> list[str]:
    """One row of the table, after kernel and M."""
    found = {}
    for column, names in COLUMNS.items():
        buffers = [traffic[name] for name in names if name in traffic.buffers]
        found[column] = buffers[0] if buffers else None
    weights = found["weights"]
    return [
        *("" if b is None else f"{b.reread:.2f}x" for b in found.values()),
        f"{traffic.bytes_read / 1024:.0f}",
        "" if weights is None else f"{weights.lines_per_access:.1f}",
    ]
