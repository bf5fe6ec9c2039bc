"""Keep the measured costs of cycles in a file, for later generations with this model on this machine."""

import math
import os
from contextlib import suppress
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .._version import __version__
from ..machine.remembered import RememberedFile, digest, machine, newest
from .costs import ALLOWANCE, RESUME_ROWS, Costs
from .plan import PLAIN, Plan
from .verdict_file import MLX_VERSION

# The BLAS and its threads determine the cost of a row on a CPU.
ENVIRONMENT = ("LD_PRELOAD", "DYLD_INSERT_LIBRARIES", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
MAX_ROW_STEPS = 10  # plain steps per row above which a cycle was disturbed, as by a stopped process


class RememberedCosts:
    """The cost file of one model on one machine, device and environment, with these versions of MLX and mlx_mtp.

    model: a fingerprint of the model, its heads and their quantization. kernels: the lane and the kernels that are
    on, which change the cost of a row.
    """

    def __init__(self, model: str, kernels: str):
        self.facts = {
            **machine(),
            "mlx": MLX_VERSION,
            "mlx_mtp": __version__,
            **backend(),
            "kernels": kernels,
            "model": model,
        }
        self._file = RememberedFile("costs", self.facts, "what cycles cost cannot be kept for the next run")

    def recall(self) -> Costs | None:
        """Return the stored costs, as `from_json` does; None without a valid file of these facts."""
        try:
            return from_json(self._file.recall().get("costs"))
        except ValueError:
            return None

    def recall_compiled(self) -> bool | None:
        """Return whether replayed cycles were at least as fast as built ones; None if that is not stored."""
        found = self._file.recall().get("compiled")
        return found if isinstance(found, bool) else None

    def keep(self, costs: Costs | None, compiled: bool | None = None) -> None:
        """Replace the file's contents by costs and the verdict on replaying; None removes what was stored of either.

        Warns, once per process, if the file cannot be written.
        """
        self._file.keep(costs=costs and to_json(costs), compiled=compiled)


def shapes_of(model: Any) -> str:
    """Return a fingerprint of the names and shapes of a model's parameters."""
    arrays: Any = tree_flatten(model.parameters())
    return digest(f"{name} {array.shape}" for name, array in arrays)


def learned_counts(model: str) -> dict[str, list[list[float]]]:
    """Return the acceptance counts of a model's newest cost file, {} without one.

    They depend on neither kernels nor versions, so these may differ. model: as in `RememberedCosts`.
    """
    for kept in newest("costs"):
        with suppress(ValueError, LookupError, TypeError):
            if kept["facts"]["model"] == model and (counts := from_json(kept["costs"]).counts):
                return counts
    return {}


def backend() -> dict[str, Any]:
    """Return the facts of the device in use and of its BLAS."""
    variables = {name: os.environ.get(name) for name in ENVIRONMENT}
    return {"backend": str(mx.default_device()), "environment": variables}


def to_json(costs: Costs) -> dict[str, Any]:
    """Return costs, without weights and state of a running generation, as JSON values that `from_json` reads."""
    every = {**{octave: levels for octave, (levels, _) in costs.octaves.items()}, costs.octave: costs.levels}
    octaves = {str(octave): _seconds(levels, costs.pace or 0.0) for octave, levels in every.items()}
    kept = {"counts": costs.counts, "budget": costs.budget, "elapsed": costs.elapsed, "again": costs.retry_at}
    return {"octaves": octaves, "wake": costs.resume, "catch_up": costs.row, **kept}


def _seconds(levels: dict[Plan, float], pace: float) -> list[list[Any]]:
    # A stepwise plan has the fourth value 1, a tree 2, one with a stem 3.
    numbers = {p: p.stepwise or (2 + p.stem) * p.tree for p in levels}
    return [
        [p.source, p.k, math.exp(level + pace), *[int(numbers[p])] * bool(numbers[p])] for p, level in levels.items()
    ]


def from_json(kept: Any) -> Costs:
    """Return costs of the values that `to_json` wrote.

    ValueError for anything else, and for a cost above MAX_ROW_STEPS plain steps per row, as of a disturbed cycle.
    The octave in use is the lowest; all weights are small, and the pace is None until a cycle is measured.
    """
    costs = Costs()
    try:
        octaves = {int(octave): _levels(seconds) for octave, seconds in kept["octaves"].items()}
        costs.octaves = {octave: (levels, _weights(levels)) for octave, levels in octaves.items()}
        every = [(plan, level) for levels in octaves.values() for plan, level in levels.items()]
        costs.row, costs.counts = float(kept["catch_up"]), kept.get("counts", {})
        costs.resume = float(kept.get("wake", RESUME_ROWS * costs.row))
        costs.elapsed, costs.retry_at = float(kept.get("elapsed", 0.0)), dict(kept.get("again", {}))
        costs.budget = float(kept.get("budget", ALLOWANCE))
        good = all(isinstance(p.source, str) and type(p.k) is int and 0 <= p.k <= 64 for p, _ in every)
        pairs = [pair for kind in costs.counts.values() for pair in kind]
        good = good and all(len(pair) == 2 and all(0 <= n < math.inf for n in pair) for pair in pairs)
        scalars = (costs.resume, costs.row, costs.budget, costs.elapsed)
        numbers = (*scalars, *costs.retry_at.values(), *(level for _, level in every))
        good = good and bool(octaves) and all(map(math.isfinite, numbers)) and costs.row > 0 <= costs.resume
        # A plan with such a cost would never be tried again.
        if not good or any(math.exp(level) > MAX_ROW_STEPS * (plan.k + 1) for plan, level in every):
            raise ValueError
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        raise ValueError(f"no costs: {kept!r}") from e
    costs.octave = min(octaves)
    costs.levels, costs.weights = costs.octaves.pop(costs.octave)
    costs.plain_first = 2
    return costs


def _levels(seconds: list[Any]) -> dict[Plan, float]:
    """Return by plan the levels (logarithms of plain steps), from the values of `_seconds`.

    ValueError for seconds that are not positive or no entries, KeyError without the plain plan.
    """
    spent = {
        Plan(source, k, stepwise=more == [1], tree=more in ([2], [3]), stem=more == [3]): value
        for source, k, value, *more in seconds
    }
    if min(spent.values()) <= 0:
        raise ValueError(f"seconds={seconds}")
    return {plan: math.log(value / spent[PLAIN]) for plan, value in spent.items()}


def _weights(levels: dict[Plan, float]) -> dict[Plan, float]:
    return dict.fromkeys(levels, 0.2)  # of another process; plain steps measure the pace
