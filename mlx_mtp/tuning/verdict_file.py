"""What trials found, kept in the user's cache directory for the next load."""

import hashlib
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from .._version import __version__
from ..kernels import _source
from ..machine import remembered as machine_file
from ..machine.atomic import write_whole

FORMAT = 1
MLX_VERSION: str = mx.__version__  # type: ignore[attr-defined]
Key = tuple[str, str, int]  # op, shape, rows


class Found(NamedTuple):
    """What a trial found: why the kernel is wrong, or stock MLX's time over its own."""

    wrong: str | None
    ratio: float | None


class Memory:
    """The findings of one model on one machine, with this MLX and these kernels; others' are in other files.

    model: a fingerprint of the model's shapes, as the caller makes it.
    """

    def __init__(self, model: str):
        self.facts = {
            **machine_file.machine(),
            "mlx": MLX_VERSION,
            "mlx_mtp": __version__,
            "kernels": _kernels(),
            "model": model,
        }

    def recall(self) -> dict[Key, Found]:
        """All findings; none where the file is missing, damaged, of another format or another's."""
        try:
            kept = json.loads(machine_file.file_of(cache_directory(), self.facts).read_text())
            if (kept["format"], kept["facts"]) != (FORMAT, self.facts):
                return {}
            return dict(_parsed(entry) for entry in kept["found"])
        except (OSError, ValueError, LookupError, TypeError, RuntimeError):
            return {}

    def keep(self, found: Mapping[Key, Found]) -> None:
        """Replace the file at once, so that a reader sees the old one or the new one; warn where it cannot be."""
        entries = [[*key, *finding] for key, finding in found.items()]
        text = json.dumps({"format": FORMAT, "facts": self.facts, "found": entries}, indent=0)
        try:
            write_whole(machine_file.file_of(cache_directory(), self.facts), text)
        except (OSError, RuntimeError) as e:
            warnings.warn(f"what kernels are faster cannot be kept for the next load ({e})", stacklevel=2)


def cache_directory() -> Path:
    """Where findings are kept: MLX_MTP_CACHE, else a directory of the user's cache; RuntimeError without a home."""
    return machine_file.cache_directory("trials")


def _parsed(entry: list) -> tuple[Key, Found]:
    """One line of the file; ValueError where this module cannot have written it."""
    op, shape, rows, wrong, ratio = entry
    if not (isinstance(op, str) and isinstance(shape, str) and type(rows) is int):
        raise ValueError(entry)
    timed = isinstance(ratio, float) and math.isfinite(ratio) and ratio > 0
    if (wrong is None) != timed or not isinstance(wrong, str | None) or not isinstance(ratio, float | None):
        raise ValueError(entry)
    return (op, shape, rows), Found(wrong, ratio)


def _kernels() -> str:
    """A hash of the kernels' sources, and of the code that launches them."""
    digest = hashlib.sha256()
    launches = Path(_source.__file__).parent
    files = [(p.relative_to(_source.DIRECTORY), p) for p in _source.DIRECTORY.rglob("*") if p.is_file()]
    files += [(p.relative_to(launches), p) for p in launches.glob("*.py")]
    for name, path in sorted(files):
        content = path.read_bytes()
        digest.update(f"{name.as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
