"""State what every site, a place in a model where a kernel may run, offers to trial and report."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from ..kernels import Quantized, served

VERIFY_ROWS = range(2, 9)  # rows of a verify that kernels may serve
TOGETHER_ROWS = tuple(range(9, 17))  # of verifies of several texts in one pass


def quantized(module: Any) -> Quantized:
    """View a quantized module's weights, [N, K] or [E, N, K], as the kernels': those that it has now."""
    form = module.group_size, module.bits, module.mode, module.scales.shape[-2:-1]
    return Quantized(module.weight, module.scales, module.get("biases"), *form)


def format_of(module: Any) -> str:
    """Say how a module is quantized: "4-bit affine g64"."""
    return f"{module.bits}-bit {module.mode} g{module.group_size}"


def known_format(module: Any) -> bool:
    """Tell whether kernels know a module's format; of what is not quantized they know every one."""
    form = "scales" not in module or served(module.mode, module.bits, module.group_size)
    return form and module.get("global_scale") is None


def rows_of(x: mx.array) -> int:
    """Count the rows M of x [..., K]."""
    return x.size // x.shape[-1]


def side_by_side(a: mx.array) -> mx.array:
    """Lay heads [1, H, M, D] side by side: [M, H * D]."""
    return a.swapaxes(1, 2).reshape(a.shape[2], -1)


class Site:
    """A place in a model where a kernel may run in the stead of MLX's own operations.

    op: the kernel. shape: in words, all else that decides which of the two is faster. width: K of x [M, K].
    candidates: the row counts M that the kernel may serve. rows: those for which it is on, none at first.
    together: more of them, which are tried once several texts share a pass.
    rows_of_context: the same for texts of a length, of an attention where the length makes a difference.
    kind: in words, what of the shape the compiled kernel depends on, "" for all of it: of an op's sites of one kind
        those with the most weights are timed for all. weights_read: by a call, about.
    split: those of `rows` that the kernel splits: fewer to a thread, with the same bits.
    asked: False where nothing that a user does has asked for it yet, so that it is not tried.

    A site may also have, as an attribute or a method:

    alone, truth, bits: as `KernelTrial` has them.
    own_bits: True where a row of the kernel has the same bits beside any others, but not those of MLX.
    stock_exact: True where a row of MLX's operations has the same bits beside any others.
    covers: the site whose work this one does, too, for the row counts for which it is on.
    """

    op: str
    shape: str
    width: int

    candidates: tuple[int, ...] = (1, *VERIFY_ROWS)
    together: tuple[int, ...] = ()
    kind: str = ""
    weights_read: int = 1
    asked: bool = True
    on: frozenset[int] = frozenset()
    split: frozenset[int] = frozenset()
    rows_of_context: Mapping[int, frozenset[int]] = MappingProxyType({})
    tried: Any = None  # what a trial has made for its rows to read

    @property
    def rows(self) -> frozenset[int]:
        return self.on

    @rows.setter
    def rows(self, rows: frozenset[int]) -> None:
        self.on, self.tried, self.rows_of_context = rows, None, {}

    def ours(self, x: mx.array) -> list[mx.array]:
        """Compute the kernel's outputs [M, N_i] for x [M, K]."""
        return self.computed(x, rows_of(x) in self.split)

    def computed(self, x: mx.array, split: bool) -> list[mx.array]:
        """Compute what `ours` does with the rows split or not, where `splits` says that they can be."""
        raise NotImplementedError

    def splits(self, rows: int) -> bool:
        """Tell whether a thread may have too few registers for so many rows, and they can be split."""
        return False

    def stock(self, x: mx.array) -> list[mx.array]:
        """Compute the same by MLX's operations."""
        raise NotImplementedError


def inexact_rows(site: Site) -> set[int]:
    """Find the row counts at which a row may have other bits than alone, with the kernel on for `site.rows`."""
    if not getattr(site, "bits", True):
        return set(site.rows)
    own_bits = getattr(site, "own_bits", False)
    if getattr(site, "stock_exact", False) and not (own_bits and site.rows):
        return set()
    rows = site.rows.intersection(*getattr(site, "rows_of_context", {}).values())
    return set(site.candidates if own_bits else VERIFY_ROWS) - rows
