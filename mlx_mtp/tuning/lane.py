"""Choose a loaded model's lane: "matrix" if its drafter's passes then cost less for the tokens that they emit.

Costs are those of the products and experts, measured by rows in both lanes. Attention, norms, states and the host's
time are equal in both and left out, so gains are overstated, and so is the loss of a single row: a lane may be chosen
that gains less than MARGIN, but none that loses more than SLOWER.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from ..kernels import has_twin, out_of_memory
from ..layers.kernel_site import Site
from ..layers.with_heads import default_draft_tokens
from ..machine.remembered import RememberedFile, digest
from .ab_test import failing
from .cost_file import backend, learned_counts, shapes_of
from .costs import PRIOR_ACCEPTANCE, accepted_shares
from .kernel_verdict import MARGIN
from .lane_costs import LaneCosts, measured
from .lane_sites import EXACT, MATRIX, in_matrix, take_machine_order
from .verdict_file import kernel_facts

SLOWER = 1.02  # maximum cost of a row in the lane "matrix", in rows of the lane "exact"
TILED = 4  # rows from which on the lane "matrix" has tiles of 8 and 16 rows
LANE_LINE = "lane "  # the beginning of a choice's line in the report
AT_ONCE = {"block": 0.75}  # share of accepted drafts, without counts, of drafters that make all drafts in one pass


class LaneChoice(NamedTuple):
    """A model's lane, "exact" or "matrix", and the reason for it."""

    lane: str
    reason: str

    def __str__(self) -> str:
        return f"{LANE_LINE}{self.lane}: {self.reason}"


class PassDrafts(NamedTuple):
    """The drafts of a model's passes.

    source: the drafter's name in plans; most: maximum drafts of a pass. shares: `costs.accepted_shares` up to there.
    """

    source: str
    most: int
    shares: Sequence[float]

    @classmethod
    def of(cls, model: Any, fingerprint: str) -> "PassDrafts":
        """Return those of a model with the default number of drafts, and with the counts of earlier generations."""
        source, most = getattr(model.drafter, "source", "heads"), default_draft_tokens(model)
        counts = learned_counts(fingerprint).get(source, [])
        return cls(source, most, accepted_shares(counts, most, AT_ONCE.get(source, PRIOR_ACCEPTANCE)))

    def tokens(self, drafts: int) -> float:
        """Return the mean number of tokens of a pass that verifies this number of drafts."""
        return 1 + sum(accumulate(self.shares[:drafts], mul))

    def passes(self, drafts: int) -> int:
        """Return how often the drafter runs before a pass."""
        return min(drafts, 1) if self.source in AT_ONCE else drafts


def rows_to_measure(drafts: int) -> tuple[int, ...]:
    """Return the row counts whose costs decide for passes of up to this number of drafts; others are interpolated."""
    return tuple(m for m in (1, 2, 3, 4, 8, 16) if m <= TILED or m < 2 * (drafts + 1))


def better_lane(costs: LaneCosts, drafting: PassDrafts) -> LaneChoice:
    """Return the lane "matrix" if it is faster by MARGIN, each lane with its best number of drafts, else "exact".

    It is "exact", too, if a single row costs more than SLOWER of one there.
    """
    plain, row = costs.rows[EXACT][1], costs.rows[MATRIX][1]
    if not all(np.isfinite([*rows.values()]).all() for rows in costs.rows.values()):
        return LaneChoice(EXACT, "an op does not run in both lanes")
    if row > SLOWER * plain:
        why = "" if has_twin() else "; this GPU adds in an unknown order, so few rows need matrices"
        return LaneChoice(EXACT, f"a row costs {row / plain:.3f} plain steps in the lane matrix{why}")
    rates = {lane: [_rate(costs, drafting, lane, k) for k in range(drafting.most + 1)] for lane in (EXACT, MATRIX)}
    best = int(np.argmax(rates[MATRIX]))
    faster = rates[MATRIX][best] > MARGIN * max(rates[EXACT])
    ours, exact = (f"{_seconds(costs, lane, best + 1) / plain:.1f}" for lane in (MATRIX, EXACT))
    text = f"M={best + 1} costs {ours} plain steps instead of {exact}; {drafting.tokens(best):.1f} tokens a pass"
    return LaneChoice(MATRIX, text) if faster else LaneChoice(EXACT, f"matrix is no faster: {text}")


def _rate(costs: LaneCosts, drafting: PassDrafts, lane: str, drafts: int) -> float:
    """Return the tokens per second of passes with this number of drafts."""
    drafted = drafting.passes(drafts) * costs.draft[lane]
    return drafting.tokens(drafts) / (_seconds(costs, lane, drafts + 1) + drafted)


def _seconds(costs: LaneCosts, lane: str, m: int) -> float:
    """Return the cost of m rows, interpolated; matrices multiply rows of a whole tile at one cost."""
    rows = costs.rows[lane]
    m = min(n for n in rows if n >= m) if lane == MATRIX and m > TILED else m
    return float(np.interp(m, [*rows], [*rows.values()]))


def chosen_lane(model: Any, sites: Sequence[Site]) -> LaneChoice:
    """Return the lane of a model that was loaded without asking for one; the same on all ranks.

    It is "exact" without drafts or products; otherwise it is read from the file of an earlier load, or measured, on
    rank 0, and stored. sites: those of the lane "exact", whose kernels are off.
    """
    if not default_draft_tokens(model):
        return LaneChoice(EXACT, "nothing drafts")
    if not any(map(in_matrix, sites)):
        return LaneChoice(EXACT, "no product has a kernel")
    if not model.ranks:
        return _recalled_or_measured(model, sites)
    return LaneChoice(*model.ranks.broadcast(None if model.ranks.rank else _recalled_or_measured(model, sites)))


def without_matrix(model: Any, wrong: str, *, remembered: bool) -> LaneChoice:
    """Return the lane "exact" for a model whose products of the lane "matrix" are wrong.

    remembered: also for later loads, unless memory was short. wrong: which product, and why.
    """
    choice = LaneChoice(EXACT, f"matrix is wrong: {wrong}")
    if remembered and not out_of_memory(wrong) and (not model.ranks or model.ranks.rank == 0):
        _file_of(model)[1].keep(**choice._asdict())
    return choice


def _file_of(model: Any) -> tuple[PassDrafts, RememberedFile]:
    """Return a model's drafting and the file of its lane, on this machine and with these versions and kernels."""
    drafting = PassDrafts.of(model, fingerprint := shapes_of(model))
    facts = {**kernel_facts(fingerprint), **backend(), "drafter": [drafting.source, drafting.most]}
    formats = [str(model.no_hidden().dtype), *sorted({site.shape for site in model.runtime.sites})]
    facts["products"] = digest(formats)
    return drafting, RememberedFile("lanes", facts, "the choice of a lane cannot be kept for the next load")


def _recalled_or_measured(model: Any, sites: Sequence[Site]) -> LaneChoice:
    """Return the stored lane, or the better one, which is then stored; "exact" without storing it if timing fails."""
    drafting, file = _file_of(model)
    kept = file.recall()
    if kept.get("lane") in (EXACT, MATRIX) and isinstance(kept.get("reason"), str):
        return LaneChoice(kept["lane"], kept["reason"])
    try:
        take_machine_order()
        choice = better_lane(measured(model, sites, rows_to_measure(drafting.most)), drafting)
    except Exception as e:  # as if memory is short; the next load measures again
        return LaneChoice(EXACT, f"timing both lanes {failing(e)}")
    file.keep(**choice._asdict())
    return choice
