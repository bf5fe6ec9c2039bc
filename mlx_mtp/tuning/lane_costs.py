"""Measure what the products and experts of a pass cost in both lanes, by rows, on this machine."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..kernels import SPLIT_ROWS, splits
from ..layers.kernel_site import Site
from ..layers.lm_head import LMHeadSite
from ..layers.products import Stack
from .ab_test import TimedOp, WrongKernel, chain_times, outputs_of
from .lane_sites import EXACT, MATRIX, in_matrix

BUDGET = 3.0  # seconds of a load, without compilation
Seconds = dict[str, dict[int, float]]  # by lane and number of rows
Timer = Callable[[Sequence[Site], Sequence[int], mx.Dtype, float], Seconds]


class PassCosts(NamedTuple):
    """Seconds of a pass's products and experts by lane and number of rows, and by lane those of a drafter's pass."""

    rows: Seconds
    draft: Mapping[str, float]


def measured(model: Any, sites: Sequence[Site], rows: Sequence[int], timer: Timer | None = None) -> PassCosts:
    """Return a model's costs. sites: those of the lane "exact", off. timer: replaces `op_seconds`, for tests.

    Of the shapes that share a kernel only the one with the most weights is timed; the others cost as much per weight.
    """
    head = getattr(model.unembedding(), "choice", None)
    groups = _groups(_of_a_pass(sites, head))
    total: Seconds = {lane: dict.fromkeys(rows, 0.0) for lane in (EXACT, MATRIX)}
    of_head = dict.fromkeys(total, 0.0)
    for shapes in groups:
        same = max(shapes, key=_weights)
        found = (timer or op_seconds)(same, rows, model.no_hidden().dtype, BUDGET / len(groups))
        share = sum(map(_weights, shapes)) / same[0].weights_read
        for lane, m in ((lane, m) for lane in total for m in rows):
            total[lane][m] += share * found[lane][m]
        if same[0] is head:
            of_head = {lane: found[lane][1] for lane in total}
    body = _body(model)
    return PassCosts(total, {lane: of_head[lane] + body * total[lane][1] for lane in total})


def _weights(same: Sequence[Site]) -> int:
    return len(same) * same[0].weights_read


def _body(model: Any) -> float:
    """Return the share of the target's bytes that one pass of the drafter reads without its LM head."""
    report, heads = model.report, 1 if model.drafter else len(model.mtp)
    return report.head_bytes / report.target_bytes / heads if report and report.target_bytes else 0.0


def _of_a_pass(sites: Sequence[Site], head: Site | None) -> list[Site]:
    """Return the sites whose weights a pass of the target reads, each weight once.

    Those of MTP heads' layers are among them, although a pass does not read them; their LM heads are not.
    """
    covered = {id(getattr(site, "covers", None)) for site in sites}
    left = [site for site in sites if _reads_weights(site) and id(site) not in covered]
    choosing = {id(site.module) for site in left if isinstance(site, LMHeadSite)}
    return [
        site
        for site in left
        if site is head or not (isinstance(site, LMHeadSite) or choosing & {*map(id, _modules(site))})
    ]


def _modules(site: Any) -> list[Any]:
    return site.modules if isinstance(site, Stack) else [getattr(site, "module", None)]


def _reads_weights(site: Site) -> bool:
    """Return whether a site multiplies by weights: a product or experts."""
    return in_matrix(site) is not None or site.op in ("verify_gemv", "verify_moe")


def _groups(sites: Sequence[Site]) -> list[list[list[Site]]]:
    """Return the sites of each shape, and of these the lists that share a kernel in one list."""
    kinds: dict[tuple[str, str], dict[str, list[Site]]] = {}
    for site in sites:
        kinds.setdefault((site.op, site.kind or site.shape), {}).setdefault(site.shape, []).append(site)
    return [[*shapes.values()] for shapes in kinds.values()]


def op_seconds(same: Sequence[Site], rows: Sequence[int], dtype: mx.Dtype, budget: float) -> Seconds:
    """Return the seconds of an op of sites of one shape in both lanes: of MLX's and our kernel the faster one.

    A kernel that does not run takes infinitely long; an op without one in the lane "matrix" costs what it costs in
    "exact". budget: seconds, without compilation.
    """
    matrices = [in_matrix(site) or site for site in same]
    sides: list[tuple[str, int, Sequence[TimedOp], mx.array]] = []
    for m in rows:
        x = mx.random.normal((m, same[0].width), dtype, key=mx.random.key(m))
        stock = [site.stock for site in same]
        kernels = {lane: [s.ours for s in each] for lane, each in ((EXACT, same), (MATRIX, matrices))}
        here = [(EXACT, stock), *((EXACT, kernels[EXACT]) for _ in range(m in same[0].every_count))]
        here += [(MATRIX, kernels[MATRIX])] if matrices[0].matrix else []
        sides += [(lane, m, ops, x) for lane, ops in here if _runs(ops[0], x)]
    times = chain_times([(ops, x) for *_, ops, x in sides], budget)
    found: Seconds = {lane: dict.fromkeys(rows, math.inf) for lane in (EXACT, MATRIX)}
    for (lane, m, *_), seconds in zip(sides, times, strict=True):
        found[lane][m] = min(found[lane][m], seconds)
    for m in filter(splits, rows):  # split rows, which are not timed, cost at most a launch per SPLIT_ROWS
        found[EXACT][m] = min(found[EXACT][m], found[EXACT][SPLIT_ROWS] * -(-m // SPLIT_ROWS))
    return found if matrices[0].matrix else dict.fromkeys((EXACT, MATRIX), found[EXACT])


def _runs(op: TimedOp, x: mx.array) -> bool:
    """Return whether an op compiles and runs."""
    try:
        outputs_of(op, x)
    except WrongKernel:
        return False
    return True
