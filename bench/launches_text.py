"""Count the bytes of Metal source that the launches of a cycle carry, by family, drafts and kernel.

    python bench/launches_text.py [--model Step-3.5-Flash --kernels]

Each launch of our kernels holds the whole text of one, which MLX 0.32.4 writes when a cycle is built (so not when it
is replayed) and hashes when it is evaluated. `ours`: header and body; `all`: with the function that MLX writes around
them; `held`: what a recorded cycle keeps, as MLX reserves 16 KiB more for a text than ours has. Counted in recorded
graphs, as `launches.py` does.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import click
import mlx.core as mx
from launches import MODELS, cycle_of, with_kernels
from launches_graph import as_on_a_mac
from rich.console import Console
from rich.table import Table

from mlx_mtp.kernels._source import DIRECTORY, RESERVED

GENERATED = re.compile(
    r"(?:template <[^>]*>\n)?\[\[kernel\]\] void (\w+)\(\n.*?\) \{\n|\n\}\n(?:\ntemplate \[\[host_.*)?$", re.S
)


class Launch(NamedTuple):
    """A launch's kernel, and the bytes of its text: ours, and with what MLX writes around it."""

    kernel: str
    ours: int
    all: int

    @property
    def held(self) -> int:
        return max(self.all, self.ours + RESERVED)


def texts(model: Any, rows: int) -> list[tuple[str, str]]:
    """List (kernel, MLX's whole text) of each launch of ours in a cycle of rows - 1 drafts; of 1 a plain step."""
    return recorded(*cycle_of(model, rows))


def recorded(fn: Callable[..., Any], arrays: Sequence[mx.array]) -> list[tuple[str, str]]:
    """List (kernel, MLX's whole text) of each launch of ours in fn(*arrays)."""
    events: list[dict[str, Any]] = []
    with as_on_a_mac():
        mx.export_function(events.append, fn, *arrays)
    sources = [event["arguments"][:2] for event in events if event.get("name") == "CustomKernel"]
    named = [(name.removeprefix("custom_kernel_").split("__")[0], text) for name, text in sources]
    return [(op, text) for op, text in named if (DIRECTORY / f"{op}.metal").exists()]


def launches(found: Iterable[tuple[str, str]]) -> list[Launch]:
    """Measure such texts."""
    return [Launch(op, len(GENERATED.sub("", text)), len(text)) for op, text in found]


def _megabytes(launched: list[Launch], what: str) -> str:
    return f"{sum(getattr(launch, what) for launch in launched) / 1e6:.2f}"


def _add_rows(table: Table, of: str, launched: list[Launch]) -> None:
    table.add_row(of, str(len(launched)), *(_megabytes(launched, what) for what in ("ours", "all", "held")))


@click.command(help=__doc__)
@click.option("--model", "names", multiple=True, type=click.Choice(list(MODELS)), help="Only this one.")
@click.option("--kernels", is_flag=True, help="Also those of each kernel.")
def main(names: tuple[str, ...], kernels: bool) -> None:
    mx.disable_compile()
    table = Table(title="MB of source in a cycle")
    for column in ("of", "launches", "ours", "all", "held"):
        table.add_column(column, justify="left" if column == "of" else "right")
    for name in names or MODELS:
        model = with_kernels(name)
        for k in (0, 1, 3):
            launched = launches(texts(model, k + 1))
            _add_rows(table, f"{name}, k = {k}", launched)
            for op in sorted({launch.kernel for launch in launched}) if kernels else ():
                of_op = [launch for launch in launched if launch.kernel == op]
                _add_rows(table, f"  {op}, each {of_op[0].ours}", of_op)
    Console().print(table)


if __name__ == "__main__":
    main()
