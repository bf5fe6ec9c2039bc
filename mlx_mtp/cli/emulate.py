"""`mlx-mtp emulate`: what Metal kernels ask of memory, counted on the CPU."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ..emulator import Traffic

# The buffers whose traffic tells kernels apart, by the names that the kernels give them.
COLUMNS = {"weights": ("w", "keys"), "scales": ("scales",), "x": ("x", "queries")}


@click.command()
@click.option("--stock", is_flag=True, help="MLX's own kernels, from the installed wheel.")
@click.option(
    "--shape", nargs=2, type=click.IntRange(min=64), default=(64, 1024), help="Rows and columns of the matrix."
)
@click.option("--rows", type=click.IntRange(1, 32), default=8, help="Most rows M of the verify.")
def emulate(stock: bool, shape: tuple[int, int], rows: int) -> None:
    """Count the memory traffic of Metal kernels at M = 1, 2, ... rows, without a GPU. Counts, not times."""
    from rich.console import Console
    from rich.table import Table

    from ..emulator.stock import stock_kernels

    if not stock:
        raise click.UsageError("there are no kernels of our own yet; --stock shows MLX's")
    if shape[1] % 64:
        raise click.BadParameter(
            f"{shape[1]} columns; must be a multiple of 64, the group of the scales", param_hint="--shape"
        )
    table = Table(title=f"bytes requested / distinct bytes, 4-bit ({shape[0]}, {shape[1]}), emulated")
    table.add_column("kernel")
    table.add_column("M", justify="right")
    for name in (*COLUMNS, "KiB requested", "lines per access"):
        table.add_column(name, justify="right")
    for kernel, measure in stock_kernels(*shape).items():
        for m in range(1, rows + 1):
            table.add_row(kernel if m == 1 else "", str(m), *_cells(measure(m)), end_section=m == rows)
    console = Console()
    console.print(table)
    console.print(
        "lines per access: lines of 64 bytes that the 32 lanes of a simdgroup touch in one read of the weights"
    )


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
