"""Turn the sites of a loaded model into those of another lane, without copies of their weights."""

import copy
from collections.abc import Sequence
from typing import Any

from ..kernels import MatrixOrder, drop_new, has_twin, matrix_orders, take_order
from ..layers.kernel_site import Site
from ..layers.lm_head import LMHeadSite, OwnHead
from ..layers.mla import OwnPerHead, PerHead
from ..layers.products import GLU, Dense, OwnDense, OwnGLU, OwnStack, Stack, VerifyRouter
from ..machine.remembered import digest

EXACT, MATRIX, MIXED = "exact", "matrix", "mixed"
UNKNOWN = MatrixOrder("", True, "nearest")
# The site in the lane `matrix` of each kind of site, and its op.
OWN: dict[type[Site], tuple[type[Site], str]] = {
    **{Stack: (OwnStack, "matrix_qmm"), GLU: (OwnGLU, "matrix_glu"), Dense: (OwnDense, "matrix_gemv")},
    **{PerHead: (OwnPerHead, "matrix_heads"), LMHeadSite: (OwnHead, "matrix_head")},
}


def in_matrix(site: Site) -> Site | None:
    """Return a site's counterpart in the lane `matrix`, which shares its weights; None if its op is not of the lane.

    Routers keep MLX's bits: they choose the experts.
    """
    for kind, (own, op) in OWN.items():
        if isinstance(site, kind) and not isinstance(getattr(site, "module", None), VerifyRouter):
            found = copy.copy(site)
            found.__class__, found.matrix, found.op = own, True, op
            return found
    return None


def become(site: Site, other: Site) -> None:
    """Turn a site into another one of the same place; modules that hold the site then run that one."""
    site.__class__, site.__dict__ = type(other), {**vars(other)}


def take_machine_order() -> str:
    """Let twins add products in the order of this machine's matrices; return its name, or a digest if it has none.

    If it cannot be read, it counts as unknown: no rows have a twin. Without Metal nothing changes.
    """
    try:
        orders = matrix_orders()
    except Exception:  # as on a GPU that refuses the probe's types
        drop_new()
        orders = {"float32": UNKNOWN}
    if not orders:
        return ""
    take_order(order := orders["float32"])
    return order.name + ("" if order.fused else ", not fused") if has_twin() else digest([str(order)])


def have_same_order(ranks: Any) -> bool:
    """Return whether the matrices of all ranks add in the same order."""
    return len(set(ranks.gather_values(take_machine_order()))) == 1


def enter_matrix(model: Any, sites: Sequence[Site]) -> list[tuple[Site, Site]]:
    """Turn a model's sites, off, into those of the lane "matrix"; return what `leave_matrix` needs."""
    model.runtime.lane, model.runtime.sums = MATRIX, take_machine_order()
    changed = [(site, own) for site in sites if (own := in_matrix(site))]
    before = [(site, copy.copy(site)) for site, _ in changed]
    for site, own in changed:
        become(site, own)
    return before


def leave_matrix(model: Any, before: Sequence[tuple[Site, Site]]) -> None:
    """Turn sites back into those of the lane "exact", all off. before: as `enter_matrix` returned."""
    model.runtime.lane, model.runtime.sums = EXACT, ""
    for site, exact in before:
        become(site, exact)
