"""Keep the findings of kernel trials in a file, for later loads of this model on this machine."""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from .._version import __version__
from ..kernels import _source
from ..kernels.contraction import AS_COMPILED, SPELLINGS, spelling
from ..machine.remembered import RememberedFile, machine

MLX_VERSION: str = mx.__version__  # type: ignore[attr-defined]
VerdictKey = tuple[str, str, int]  # op, shape, rows


class TrialFinding(NamedTuple):
    """The finding of a kernel trial.

    wrong: why the kernel is wrong; None if it was timed, "" if it is right and was not timed. ratio: time of MLX's
    operations over the kernel's. spelling: of its multiply-adds, see `kernels/contraction.h`. split: whether the rows
    were split, because that is faster or the only way the kernel runs.
    """

    wrong: str | None
    ratio: float | None
    spelling: str = AS_COMPILED
    split: bool = False


class RememberedVerdicts:
    """The file of findings of one model on one machine, with this MLX and these kernels.

    model: a fingerprint of the model's shapes and lane.
    """

    def __init__(self, model: str):
        self._file = RememberedFile(
            "trials", kernel_facts(model), "what kernels are faster cannot be kept for the next load"
        )
        self._found: dict[VerdictKey, TrialFinding] = {}

    def recall(self) -> dict[VerdictKey, TrialFinding]:
        """Return all findings in the file and of this process.

        If there is no valid file of this machine, model, MLX and kernels, return those of this process alone.
        """
        try:
            kept = self._file.recall()
            spellings = kept.get("spellings", {})
            return dict(_parsed(entry, spellings) for entry in kept["found"]) | self._found
        except (ValueError, LookupError, TypeError, AttributeError):
            return self._found

    def keep(self, found: Mapping[VerdictKey, TrialFinding]) -> None:
        """Replace the findings in the file; omit those whose spelling of multiply-adds is no longer the op's.

        If the file cannot be written, warn once.
        """
        self._found = {key: f for key, f in found.items() if f.spelling == spelling(key[0])}
        spellings = {op: f.spelling for (op, *_), f in self._found.items() if f.spelling != AS_COMPILED}
        self._file.keep(
            found=[[*key, f.wrong, f.ratio, f.split] for key, f in self._found.items()], spellings=spellings
        )

    def add(self, found: Mapping[VerdictKey, TrialFinding]) -> None:
        """Add findings to the file; with none it is not written."""
        if found:
            self.keep({**self.recall(), **found})


def kernel_facts(model: str) -> dict[str, Any]:
    """Return the facts that results of a model's kernels depend on: machine, versions, kernels' sources and model."""
    return {**machine(), "mlx": MLX_VERSION, "mlx_mtp": __version__, "kernels": _kernels(), "model": model}


def _parsed(entry: list, spellings: dict[str, str]) -> tuple[VerdictKey, TrialFinding]:
    """Return the key and the finding of one entry of the file; ValueError or TypeError if `keep` did not write it."""
    op, shape, rows, wrong, ratio, split = entry
    timed = wrong is None and isinstance(ratio, float) and 0 < ratio < math.inf
    found = timed or (isinstance(wrong, str) and ratio is None)
    if not (isinstance(op, str) and isinstance(shape, str) and type(rows) is int and type(split) is bool and found):
        raise ValueError(entry)
    if (used := spellings.get(op, AS_COMPILED)) not in SPELLINGS:
        raise ValueError(used)
    return (op, shape, rows), TrialFinding(wrong, ratio, used, split)


def _kernels() -> str:
    """Return a hash of the kernels' sources and of the code that launches them."""
    digest, parts = hashlib.sha256(), ((_source.DIRECTORY, "**/*"), (Path(_source.__file__).parent, "*.py"))
    files = [(p.relative_to(root), p) for root, pattern in parts for p in root.glob(pattern) if p.is_file()]
    for name, path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{name.as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
