"""How long each phase is predicted to take on a chip, by stock MLX and by ours, and what each kernel takes off."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .chips import Chip
from .cost import Costs, Pass, of_drafts, of_model, seconds
from .floor import CYCLE, DRAFT, PLAIN, ROWS, VERIFY
from .launches import ALL, KERNELS
from .ops import OVERLAPS, Model

STOCK, OURS = "stock MLX", "ours"
SHOWN_OVERLAP = "published"  # the one that tables show where they show one
KERNEL_ROWS = (1, 2, 4, 8)


def predicted(model: Model, chip: Chip, context: int, rows: Iterable[int] = ROWS) -> list[dict[str, Any]]:
    """Seconds of every phase: phase, rows M of the verify, drafts k, side, overlap, seconds, launches.

    Stock MLX reads an expert for each token that visits it, so that its times are the same at every overlap.
    """
    found, rows = [], list(rows)
    for overlap in OVERLAPS:
        for side, on in ((STOCK, frozenset()), (OURS, ALL)):
            at = Pass(1, on, context, overlap)
            phases = [(PLAIN, 1, of_model(model, at, chip))]
            for m in rows:
                verify = of_model(model, replace(at, m=m), chip)
                phases.append((VERIFY, m, verify))
                if m - 1 <= model.max_drafts:
                    draft = of_drafts(model, m - 1, at, chip)
                    phases += [(DRAFT, m, draft), (CYCLE, m, (verify, draft))]
            for phase, m, costs in phases:
                found.append(_row(phase, m, side, overlap, costs, chip))
    return found


def _row(phase: str, m: int, side: str, overlap: str, costs: Any, chip: Chip) -> dict[str, Any]:
    parts: list[Costs] = [costs] if isinstance(costs, Costs) else list(costs)
    return {
        **{"phase": phase, "rows": m, "drafts": m - 1, "side": side, "overlap": overlap},
        **{"seconds": sum(seconds(c, chip) for c in parts), "launches": sum(c.launches for c in parts)},
    }


def kernels(model: Model, chip: Chip, context: int, rows: Iterable[int] = KERNEL_ROWS) -> list[dict[str, Any]]:
    """What each kind of kernels alone, and all together, take off a pass of stock MLX: kernels, ops, rows, seconds.

    Experts are routed as published.
    """
    found = []
    for m in rows:
        at = Pass(m, context=context, overlap=SHOWN_OVERLAP)
        stock = seconds(of_model(model, at, chip), chip)
        for kind, on in [*((kind, frozenset((kind,))) for kind in KERNELS), ("all", ALL)]:
            ours = seconds(of_model(model, replace(at, on=on), chip), chip)
            ops = list(KERNELS.get(kind, ()))
            found.append({"kernels": kind, "ops": ops, "rows": m, "stock": stock, "seconds": stock - ours})
    return found
