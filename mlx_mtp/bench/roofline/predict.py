"""Predict how long each phase takes on a chip, by stock MLX and by ours, and what each kernel takes off."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from .chips import Chip
from .cost import PassShape, of_drafts, of_model, seconds
from .floor import CYCLE, DRAFT, ROWS, phases_with
from .launches import ALL, KERNELS
from .ops import OVERLAPS, ModelOps

STOCK, OURS = "stock MLX", "ours"
SHOWN_OVERLAP = "published"  # the one that tables show where they show one
KERNEL_ROWS = (1, 2, 4, 8)


def predicted(model: ModelOps, chip: Chip, context: int, rows: Iterable[int] = ROWS) -> list[dict[str, Any]]:
    """Predict every phase: phase, rows M of the verify, drafts k, side, overlap, seconds, launches.

    Stock MLX reads an expert for each token that visits it, so that its times are the same at every overlap.
    """
    sides, found = {STOCK: frozenset[str](), OURS: ALL}, []
    for overlap, side, (phase, m) in product(OVERLAPS, sides, phases_with(model, rows)):
        at = PassShape(m, sides[side], context, overlap)
        costs = [of_model(model, at, chip)] if phase != DRAFT else []
        costs += [of_drafts(model, m - 1, at, chip)] if phase in (DRAFT, CYCLE) else []
        times = {"seconds": sum(seconds(c, chip) for c in costs), "launches": sum(c.launches for c in costs)}
        found.append({"phase": phase, "rows": m, "drafts": m - 1, "side": side, "overlap": overlap, **times})
    return found


def shown_times(lines: Sequence[dict[str, Any]]) -> dict[tuple[str, str, int], float]:
    """Index seconds, predicted or measured, by side, phase and rows M, of one overlap; the first counts."""
    shown = [line for line in lines if line.get("overlap", SHOWN_OVERLAP) == SHOWN_OVERLAP]
    return {(line["side"], line["phase"], line["rows"]): line["seconds"] for line in reversed(shown)}


def kernels(model: ModelOps, chip: Chip, context: int, rows: Iterable[int] = KERNEL_ROWS) -> list[dict[str, Any]]:
    """Predict what kernels of each kind, and all together, take off a pass of stock MLX, experts routed as published.

    A line: kernels, ops, rows, stock's seconds, and those that come off.
    """
    found = []
    for m in rows:
        at = PassShape(m, context=context, overlap=SHOWN_OVERLAP)
        stock = seconds(of_model(model, at, chip), chip)
        for kind, ops in (KERNELS | {"all": ()}).items():
            on = frozenset((kind,)) if ops else ALL
            ours = seconds(of_model(model, replace(at, on=on), chip), chip)
            found.append({"kernels": kind, "ops": list(ops), "rows": m, "stock": stock, "seconds": stock - ours})
    return found
