"""Define `mlx-mtp emulate`: count the memory traffic of Metal kernels on the CPU."""

import click
from click import Choice, IntRange, option

TABLES = ("products", "attention", "experts", "head")


@click.command()
@option("--of", "tables", type=Choice(TABLES), multiple=True, help="Only this table; repeatable.")
@option("--stock", is_flag=True, help="Only MLX's own kernels for products, from the installed wheel.")
@option("--shape", nargs=2, type=IntRange(64), default=(64, 1024), help="Rows and columns of the products' matrix.")
@option("--rows", type=IntRange(1, 32), default=8, help="Maximum number of rows M.")
def emulate(tables: tuple[str, ...], stock: bool, shape: tuple[int, int], rows: int) -> None:
    """Count the memory traffic of Metal kernels without a GPU.

    The counts compare our kernels with MLX's own at M = 1, 2, ... rows: products with a matrix, attention, a mixture
    of experts, and an LM head. They are not times. The command runs on Linux and needs clang: pip install -e
    '.[emulate]'.
    """
    from rich.console import Console

    from . import emulate_tables

    if shape[1] % 64:
        wrong = f"{shape[1]} columns; expected a multiple of 64, the group size of the scales"
        raise click.BadParameter(wrong, param_hint="--shape")
    console = Console()
    for name in ("products",) if stock else tables or TABLES:
        own = (stock, shape, rows) if name == "products" else ()
        console.print(getattr(emulate_tables, f"{name}_table")(*own))
