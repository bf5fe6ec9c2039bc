"""Remember what cycles cost, for the next generation with this model on this machine."""

import os

import mlx.core as mx

from .._version import __version__
from ..machine.remembered import RememberedFile, machine
from .costs import Costs

MLX_VERSION: str = mx.__version__  # type: ignore[attr-defined]
# The BLAS and its threads, which on a CPU decide what a row costs.
ENVIRONMENT = ("LD_PRELOAD", "DYLD_INSERT_LIBRARIES", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")


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
            return Costs.from_json(self._file.recall().get("costs"))
        except ValueError:
            return None

    def recall_compiled(self) -> bool | None:
        """Read whether compiled cycles were found faster; None where that is not known."""
        found = self._file.recall().get("compiled")
        return found if isinstance(found, bool) else None

    def keep(self, costs: Costs | None, compiled: bool | None = None) -> None:
        """Replace what was kept; where it cannot be written, warn, but only the first time."""
        self._file.keep(costs=costs and costs.to_json(), compiled=compiled)
