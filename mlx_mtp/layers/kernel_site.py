"""Define the interface of a site, a place in a model where a kernel may run, for trials and reports."""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from ..cache.ring import MAX_ROWS
from ..kernels import Quantized, served
from .scaled import SCALE

VERIFY_ROWS = range(2, 9)  # rows of a verify of up to seven drafts
TOGETHER_ROWS = tuple(range(9, MAX_ROWS + 1))  # rows of a verify of more drafts, or of several sequences in one pass


def quantized(module: Any) -> Quantized:
    """Return a quantized module's current weights, [N, K] or [E, N, K], as `Quantized`; its `bias` is left out."""
    form = module.group_size, module.bits, module.mode, module.scales.shape[-2:-1]
    return Quantized(module.weight, module.scales, module.get("biases"), *form)


def format_of(module: Any) -> str:
    """Describe a module's quantization: "4-bit affine g64"."""
    return f"{module.bits}-bit {module.mode} g{module.group_size}"


def known_format(module: Any, *, scaled: bool = False) -> bool:
    """Return whether kernels support a module's format; an unquantized module counts as supported.

    False if the module has a `global_scale` or, unless `scaled`, an output scale. scaled: whether the caller's kernel
    applies output scales.
    """
    form = "scales" not in module or served(module.mode, module.bits, module.group_size)
    return form and module.get("global_scale") is None and (scaled or module.get(SCALE) is None)


def rows_of(x: mx.array) -> int:
    """Return the number of rows M of x [..., K]."""
    return x.size // x.shape[-1]


def side_by_side(a: mx.array) -> mx.array:
    """Concatenate heads [1, H, M, D] along the last axis: [M, H * D]."""
    return a.swapaxes(1, 2).reshape(a.shape[2], -1)


class Site:
    """A place in a model where a kernel may replace MLX's operations.

    op: name of the kernel. shape: description of everything else that decides which is faster. width: K of x [M, K].
    candidates: the row counts M that the kernel may serve. rows: those for which it is on, none at first.
    together: further row counts, tried once a cycle may have more than seven drafts or several sequences.
    rows_of_context: `rows` by member of CONTEXTS, for those tried in addition; `rows` hold for the others.
    kind: the part of the shape that the compiled kernel depends on, "" for all of it. Of an op's shapes of one kind
        only the one with the most weights, over all its sites, is timed.
    weights_read: the number of weights that the site reads, or of their rows; compared among sites of a kind only.
    split: those of `rows` that the kernel splits into fewer rows per thread, with the same bits.
    matrix: whether its products are those of the lane `matrix`.
    asked: False until something in use needs the site; before that it is not tried.

    A site may also have, as an attribute or a method:

    alone, truth, bits: as in `KernelTrial`.
    own_bits: True if a row's bits do not depend on the other rows, but differ from MLX's.
    stock_exact: True if a row's bits in MLX's operations do not depend on the other rows.
    covers: the site whose work this one includes at the row counts for which it is on.
    """

    op: str
    shape: str
    width: int

    candidates: tuple[int, ...] = (1, *VERIFY_ROWS)
    together: tuple[int, ...] = TOGETHER_ROWS
    kind: str = ""
    weights_read: int = 1
    matrix: bool = False
    asked: bool = True
    on: frozenset[int] = frozenset()
    split: frozenset[int] = frozenset()
    rows_of_context: Mapping[int, frozenset[int]] = MappingProxyType({})
    tried: Any = None  # inputs that a trial has created

    @property
    def every_count(self) -> tuple[int, ...]:
        """All row counts that the kernel may serve."""
        return *self.candidates, *self.together

    @property
    def rows(self) -> frozenset[int]:
        return self.on

    @rows.setter
    def rows(self, rows: frozenset[int]) -> None:
        self.on, self.tried, self.rows_of_context = rows, None, {}

    def ours(self, x: mx.array) -> list[mx.array]:
        """Return the kernel's outputs [M, N_i] for x [M, K]."""
        return self.computed(x, rows_of(x) in self.split)

    def computed(self, x: mx.array, split: bool) -> list[mx.array]:
        """Return the outputs of `ours` with the rows split or not, if `splits` allows both."""
        raise NotImplementedError

    def splits(self, rows: int) -> bool:
        """Return whether this number of rows may exceed a thread's registers and can be split."""
        return False

    def stock(self, x: mx.array) -> list[mx.array]:
        """Return the same outputs, computed by MLX's operations."""
        raise NotImplementedError


def inexact_rows(site: Site, more: Collection[int] = ()) -> set[int]:
    """Return the row counts at which a row's bits may differ from those at other counts.

    more: the row counts of `together` that occur as well. The kernel counts as on for the `site.rows` at which it is
    on at every context.
    """
    if not getattr(site, "bits", True):
        return set(site.rows)
    own_bits = getattr(site, "own_bits", False)
    if getattr(site, "stock_exact", False) and not (own_bits and site.rows):
        return set()
    rows = site.rows.intersection(*getattr(site, "rows_of_context", {}).values())
    return {*(site.candidates if own_bits else VERIFY_ROWS), *more} - rows
