"""What cycles cost, kept in the user's cache directory for the next generation with this model on this machine."""

import json
import os
import warnings
from typing import Any

import mlx.core as mx

from .._version import __version__
from ..machine import remembered as machine_file
from ..machine.atomic import write_whole
from .costs import Costs

FORMAT = 1
MLX_VERSION: str = mx.__version__  # type: ignore[attr-defined]
# The BLAS and its threads, which on a CPU decide what a row costs.
ENVIRONMENT = ("LD_PRELOAD", "DYLD_INSERT_LIBRARIES", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_warned: set[str] = set()


class CostMemory:
    """The costs of one model on one machine, with this MLX; others' are in other files.

    model: a fingerprint of the model, its heads and their quantization, as the caller makes it.
    kernels: the setting of the kernels, as they change what a row costs.
    """

    def __init__(self, model: str, kernels: str):
        self.facts: dict[str, Any] = {
            **machine_file.machine(),
            "mlx": MLX_VERSION,
            "mlx_mtp": __version__,
            "backend": str(mx.default_device()),
            "environment": {name: os.environ.get(name) for name in ENVIRONMENT},
            "kernels": kernels,
            "model": model,
        }

    def recall(self) -> Costs | None:
        """What was kept; None where the file is missing, damaged, of another format or another's."""
        try:
            kept = self._kept().get("costs")
            return None if kept is None else Costs.from_json(kept)
        except ValueError:
            return None

    def recall_compiled(self) -> bool | None:
        """Whether compiled cycles were found faster; None where that is not known."""
        found = self._kept().get("compiled")
        return found if isinstance(found, bool) else None

    def keep(self, costs: Costs | None, compiled: bool | None = None) -> None:
        """Replace the file at once; where it cannot be written, warn, but only the first time."""
        known = {"costs": costs and costs.to_json(), "compiled": compiled}
        text = json.dumps({"format": FORMAT, "facts": self.facts, **known}, indent=0)
        try:
            write_whole(self._file(), text)
        except (OSError, RuntimeError) as e:
            if str(e) not in _warned:
                _warned.add(str(e))
                warnings.warn(f"what cycles cost cannot be kept for the next run ({e})", stacklevel=2)

    def _kept(self) -> dict[str, Any]:
        """The file's content; empty where it is missing, damaged, of another format or another's."""
        try:
            kept = json.loads(self._file().read_text())
            return kept if (kept["format"], kept["facts"]) == (FORMAT, self.facts) else {}
        except (OSError, ValueError, LookupError, TypeError, RuntimeError):
            return {}

    def _file(self):
        return machine_file.file_of(machine_file.cache_directory("costs"), self.facts)
