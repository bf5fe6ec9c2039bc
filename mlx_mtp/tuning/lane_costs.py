"""Measure what the products and experts of a pass cost in both lanes, by rows, on this machine."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..kernels import SPLIT_ROWS, splits
from ..layers.kernel_site import Site
from ..layers.lm_head import LMHeadSite
from ..layers.products import GLU, Stack
from .ab_test import TimedOp, WrongKernel, chain_times, outputs_of
from .lane_sites import EXACT, MATRIX, in_matrix

FEW = 0.05  # share of all quantized weights of products below which those of a format are not timed
BUDGET = 3.0  # seconds of a load, without compilation
Seconds = dict[str, dict[int, float]]  # by lane and number of rows
OpTimer = Callable[[Sequence[Site], Sequence[int], mx.Dtype, float], Seconds]


class LaneCosts(NamedTuple):
    """Seconds of a pass's products and experts by lane and number of rows, and by lane those of a drafter's pass."""

    rows: Seconds
    draft: Mapping[str, float]


def measured(model: Any, sites: Sequence[Site], rows: Sequence[int], timer: OpTimer | None = None) -> LaneCosts:
    """Return a model's costs. sites: those of the lane "exact", off. timer: replaces `op_seconds`, for tests.

    Each timed shape is compiled for both lanes, so of the products by quantized weights of one format only that with
    the most weights is timed; the others, and formats of few weights, cost as much per weight.
    """
    head = getattr(model.unembedding(), "choice", None)
    groups = _groups(_of_a_pass(sites, head))
    total: Seconds = {lane: dict.fromkeys(rows, 0.0) for lane in (EXACT, MATRIX)}
    of_head = dict.fromkeys(total, 0.0)
    for shapes in groups:
        same = max(shapes, key=_weights)
        found = (timer or op_seconds)(same, rows, model.no_hidden().dtype, BUDGET / len(groups))
        each = _weights(same[:1])
        for lane, seconds in total.items():
            for m in seconds:
                seconds[m] += sum(map(_weights, shapes)) / each * found[lane][m]
        if head and [head] in shapes:
            of_head = {lane: _weights([head]) / each * found[lane][1] for lane in total}
    body = _body(model)
    return LaneCosts(total, {lane: of_head[lane] + body * total[lane][1] for lane in total})


def _weights(same: Sequence[Site]) -> int:
    first = same[0]
    return len(same) * first.weights_read * (first.width if isinstance(first, LMHeadSite) else 1)


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
    """Return the sites of each op and shape, in one list those that cost as much per weight (see `measured`)."""
    groups: dict[Any, dict[tuple[str, str], list[Site]]] = {}
    for site in sites:
        form = site.kind.partition(",")[0]  # without how a GPU's lanes share a row of weights
        group = form if isinstance(site, Stack | GLU | LMHeadSite) else (site.op, site.kind or site.shape)
        groups.setdefault(group, {}).setdefault((site.op, site.shape), []).append(site)
    weights = {form: sum(map(_weights, groups[form].values())) for form in groups if isinstance(form, str)}
    few = [form for form in weights if weights[form] < FEW * sum(weights.values())]
    for form in few:
        groups[max(weights, key=weights.__getitem__)] |= groups.pop(form)
    return [[*shapes.values()] for shapes in groups.values()]


def op_seconds(same: Sequence[Site], rows: Sequence[int], dtype: mx.Dtype, budget: float) -> Seconds:
    """Return the seconds of an op of sites of one shape in both lanes: of MLX's and our kernel the faster one.

    A kernel that does not run takes infinitely long. An op without one in the lane "matrix" costs what it costs in
    "exact". Split rows are not timed: they cost at most a launch per SPLIT_ROWS. budget: seconds, to time.
    """
    matrices = [own for site in same if (own := in_matrix(site))]
    found: Seconds = {lane: dict.fromkeys(rows, math.inf) for lane in (EXACT, MATRIX)}
    for m in rows:
        x = mx.random.normal((m, same[0].width), dtype, key=mx.random.key(m))
        here: list[tuple[str, Sequence[TimedOp]]] = [(EXACT, [site.stock for site in same])]
        here += [(EXACT, [site.ours for site in same])] if m in same[0].every_count else []
        here += [(MATRIX, [site.ours for site in matrices])] if matrices else []
        sides = [(lane, ops) for lane, ops in here if _runs(ops[0], x)]
        times = chain_times([(ops, x) for _, ops in sides], budget / len(rows))  # few rows: long chains
        for (lane, _), seconds in zip(sides, times, strict=True):
            found[lane][m] = min(found[lane][m], seconds)
    for m in filter(splits, rows):
        found[EXACT][m] = min(found[EXACT][m], found[EXACT][SPLIT_ROWS] * -(-m // SPLIT_ROWS))
    return found if matrices else dict.fromkeys((EXACT, MATRIX), found[EXACT])


def _runs(op: TimedOp, x: mx.array) -> bool:
    """Return whether an op compiles and runs."""
    try:
        outputs_of(op, x)
    except WrongKernel:
        return False
    return True
