"""Measure the Metal source that the launches of a cycle carry, in bytes.

Each launch of our kernels holds a whole text, which MLX 0.32.4 writes when a cycle is built (not when it is replayed)
and hashes when it is evaluated. `ours`: header and body; `all`: with the function that MLX generates around them;
`held`: what a recorded cycle keeps, because MLX reserves 16 KiB more than our text needs.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_mtp.kernels._source import DIRECTORY, RESERVED

from .graph import as_on_a_mac
from .steps import cycle_of

GENERATED = re.compile(
    r"(?:template <[^>]*>\n)?\[\[kernel\]\] void (\w+)\(\n.*?\) \{\n|\n\}\n(?:\ntemplate \[\[host_.*)?$", re.S
)


class Launch(NamedTuple):
    """A launch's kernel, and the bytes of its text: ours, and with the function that MLX generates."""

    kernel: str
    ours: int
    all: int

    @property
    def held(self) -> int:
        return max(self.all, self.ours + RESERVED)


def texts(model: Any, rows: int) -> list[tuple[str, str]]:
    """Return (kernel, MLX's text) of each of our launches in a cycle of rows - 1 drafts, or in a plain step."""
    return recorded(*cycle_of(model, rows))


def recorded(fn: Callable[..., Any], arrays: Sequence[mx.array]) -> list[tuple[str, str]]:
    """Return (kernel, MLX's text) of each of our launches in fn(*arrays)."""
    events: list[dict[str, Any]] = []
    with as_on_a_mac():
        mx.export_function(events.append, fn, *arrays)
    sources = [event["arguments"][:2] for event in events if event.get("name") == "CustomKernel"]
    named = [(name.removeprefix("custom_kernel_").split("__")[0], text) for name, text in sources]
    return [(op, text) for op, text in named if (DIRECTORY / f"{op}.metal").exists()]


def launches(found: Iterable[tuple[str, str]]) -> list[Launch]:
    """Return the sizes of such texts."""
    return [Launch(op, len(GENERATED.sub("", text)), len(text)) for op, text in found]
