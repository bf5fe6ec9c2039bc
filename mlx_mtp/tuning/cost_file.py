"""Remember what cycles cost, for the next generation with this model on this machine."""

import math
import os
from typing import Any

import mlx.core as mx

from .._version import __version__
from ..machine.remembered import RememberedFile, machine
from .costs import FEW, LOST, Costs
from .plan import PLAIN, Plan

MLX_VERSION: str = mx.__version__  # type: ignore[attr-defined]
# The BLAS and its threads, which on a CPU decide what a row costs.
ENVIRONMENT = ("LD_PRELOAD", "DYLD_INSERT_LIBRARIES", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
DEAREST = 10  # plain steps per row of a cycle, which no machine takes: a process was stopped, or starved


class RememberedCosts:
    """The costs of one model on one machine, with this MLX.

    model: a fingerprint of the model, its heads and their quantization, as the caller makes it.
    kernels: the setting of the kernels, as they change what a row costs.
    """

    def __init__(self, model: str, kernels: str):
        self.facts = {
            **machine(),
            "mlx": MLX_VERSION,
            "mlx_mtp": __version__,
            "backend": str(mx.default_device()),
            "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
            "kernels": kernels,
            "model": model,
        }
        self._file = RememberedFile("costs", self.facts, "what cycles cost cannot be kept for the next run")

    def recall(self) -> Costs | None:
        """Read the costs; None where there are none, or no file that this machine, model and MLX wrote."""
        try:
            return from_json(self._file.recall().get("costs"))
        except ValueError:
            return None

    def recall_compiled(self) -> bool | None:
        """Read whether compiled cycles were found faster; None where that is not known."""
        found = self._file.recall().get("compiled")
        return found if isinstance(found, bool) else None

    def keep(self, costs: Costs | None, compiled: bool | None = None) -> None:
        """Replace what was kept; where it cannot be written, warn, but only the first time."""
        self._file.keep(costs=costs and to_json(costs), compiled=compiled)


def to_json(costs: Costs) -> dict[str, Any]:
    """Give what `from_json` reads: seconds per plan, plain steps, counts of drafts."""
    seconds = [[p.source, p.k, math.exp(level + (costs.pace or 0.0))] for p, level in costs.levels.items()]
    kept = {"counts": costs.counts, "budget": costs.budget, "elapsed": costs.elapsed, "again": costs.again}
    return {"seconds": seconds, "wake": costs.wake, "catch_up": costs.row, **kept}


def from_json(kept: Any) -> Costs:
    """Read what an earlier run learned; ValueError where `to_json` cannot have written this."""
    costs = Costs()
    try:
        spent = {Plan(source, k): seconds for source, k, seconds in kept["seconds"]}
        costs.levels = {plan: math.log(seconds / spent[PLAIN]) for plan, seconds in spent.items()}
        costs.row, costs.counts = float(kept["catch_up"]), kept.get("counts", {})
        costs.wake = float(kept.get("wake", FEW * costs.row))
        costs.elapsed, costs.again = float(kept.get("elapsed", 0.0)), dict(kept.get("again", {}))
        costs.budget = float(kept.get("budget", LOST))
        good = all(isinstance(p.source, str) and type(p.k) is int and 0 <= p.k <= 64 for p in costs.levels)
        pairs = [pair for kind in costs.counts.values() for pair in kind]
        good = good and all(len(pair) == 2 and all(0 <= n < math.inf for n in pair) for pair in pairs)
        numbers = (costs.wake, costs.row, costs.budget, costs.elapsed, *costs.again.values(), *costs.levels.values())
        good = good and all(map(math.isfinite, numbers)) and min(*spent.values(), costs.row) > 0 <= costs.wake
        # Else such a cost would stay for ever: what seems that dear is not tried again.
        good = good and all(costs.steps(plan) <= DEAREST * (plan.k + 1) for plan in spent)
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise ValueError(f"no costs: {kept!r}") from e
    if not good:
        raise ValueError(f"no costs: {kept!r}")
    costs.weights = dict.fromkeys(costs.levels, 0.2)  # another process' figures; plain steps tell the pace
    costs.unsure = 2
    return costs
