"""Choose the number of drafts in cycles of several sequences, by the measured costs of that number of sequences."""

from typing import Any

import mlx.core as mx

from ..cache.arrays import rereads
from ..cache.ring import MAX_ROWS
from ..layers.kernel_site import VERIFY_ROWS
from ..layers.target import Target
from ..tuning.controller import Controller
from ..tuning.costs import PRIOR_WEIGHT, Costs
from ..tuning.plan import Cycle, Fixed, by_depth
from .drafters import names_of
from .flight import Flight
from .policy import fixed_nodes, learned, others_of, trees_of

Control = Controller | Fixed
MOST_ON_GPU = VERIFY_ROWS[-1] - 1  # the kernels of products take 16 rows of all sequences


class Controls:
    """One control per number of sequences and limits of drafts: a draft's cost depends on the other rows of the pass.

    adaptive: choose the number of drafts by measured costs, else always the maximum. p_min: whether plans with p_min
    can be chosen; if not adaptive, all plans with drafts of the model's drafter then have it. replayed: cycles are
    replayed, which costs less than building them.
    """

    def __init__(self, model: Target, *, adaptive: bool, p_min: bool = False, replayed: bool = False):
        self.model, self.adaptive, self.p_min, self.replayed = model, adaptive, p_min, replayed
        self._made: dict[tuple[int, int, int, bool, int], Control] = {}

    def control(self, sequences: int, k: int, max_lookup: int = 0, masked: bool = False, tree: int = 0) -> Control:
        """Return the control of cycles of `sequences` sequences with at most k drafts, or max_lookup of a lookup.

        masked: whether a sequence has a grammar. tree: maximum rows of each sequence's tree, 0 for none. Equal
        arguments return the same object. The control is Fixed if not adaptive, or if k and max_lookup are 0. On a GPU
        adaptive cycles of several sequences have at most MOST_ON_GPU drafts, and trees of MAX_ROWS rows of all.
        """
        if self.adaptive:
            k, max_lookup = (min(each, most_together(sequences)) for each in (k, max_lookup))
            tree = min(tree, MAX_ROWS // sequences) if mx.default_device() != mx.cpu else tree
        key = sequences, k, max_lookup, masked, tree
        if key not in self._made:
            how: dict[str, Any] = {"max_lookup": max_lookup, "p_min": self.p_min, "names": names_of(self.model)}
            nodes = max(0, tree - 1)
            if self.adaptive and (k or max_lookup):
                made = self._controller(sequences, k, {**how, "masked": masked, "trees": trees_of(self.model, nodes)})
            else:
                made = Fixed(k, **how, nodes=fixed_nodes(self.model, nodes))
            self._made[key] = made
        return self._made[key]

    def _controller(self, sequences: int, k: int, how: dict[str, Any]) -> Controller:
        """Return a controller that starts with the model's costs of this number of sequences, or the nearest number.

        If the model has none, it starts with Controller's own. The controller's costs, which it continues to update,
        become the model's costs of this number. k: maximum drafts. how: further arguments of `Controller`.
        """
        costs = learned(self.model)
        known = costs.together_replayed if self.replayed else costs.together
        if sequences not in known and known:
            known[sequences] = _estimate(known[min(known, key=lambda n: abs(n - sequences))])
        how |= {"others": others_of(self.model, k), "growth": costs.growth, "rereads": rereads(self.model)}
        control = Controller(max_drafts=k, known=known.get(sequences), **how)
        known[sequences] = control.costs
        return control


def most_together(sequences: int) -> int:
    """Return the maximum drafts in adaptive cycles of a number of sequences.

    MOST_ON_GPU for several on a GPU, else MAX_ROWS - 1: a ring takes these and the newest token.
    """
    return MOST_ON_GPU if sequences > 1 and mx.default_device() != mx.cpu else MAX_ROWS - 1


def _estimate(known: Costs) -> Costs:
    """Return costs for another number of sequences: levels and counts of `known`, not copied, with small weights."""
    costs = Costs()
    costs.levels, costs.resume, costs.row, costs.counts = known.levels, known.resume, known.row, known.counts
    costs.octave = known.octave
    costs.weights = {plan: min(PRIOR_WEIGHT, weight) for plan, weight in known.weights.items()}
    return costs


def outcome(flight: Flight, seconds: float | None) -> Cycle:
    """Return the outcome of a cycle that was read, whose counts are means over its sequences, with its `seconds`."""
    kept, verified = flight.kept, flight.run.verified
    mean = sum(counts.accepted for counts in kept) / len(kept)
    several = not flight.plan.tree and (len(flight.rows) > 1 or flight.masks)
    shares = by_depth(kept, verified) if several else {"nodes": flight.nodes}
    how: Any = {"matched": flight.matched, "context": flight.context, **shares}
    return Cycle(flight.plan, verified, mean, seconds, flight.prefilled, **how)
