"""Remember figures that hold on one machine: JSON files in the user's cache, named by what the figures depend on."""

import hashlib
import json
import os
import platform
import sys
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from .atomic import write_whole

FORMAT = 1  # of all these files

_warned: set[str] = set()


def machine() -> dict[str, Any]:
    """The facts of this machine that times depend on."""
    device = mx.device_info()
    facts = {name: device.get(name) for name in ("device_name", "architecture", "memory_size")}
    return {**facts, "system": f"{platform.system()} {platform.release()}"}


def digest(lines: Iterable[str]) -> str:
    """Make a fingerprint of lines, in whatever order they come."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def cache_directory(kind: str = "trials") -> Path:
    """Find where files of a kind are kept: MLX_MTP_CACHE, else the user's cache; RuntimeError without a home."""
    if chosen := os.environ.get("MLX_MTP_CACHE"):
        return Path(chosen).expanduser() / ("" if kind == "trials" else kind)
    usual = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / usual) / "mlx_mtp" / kind


def file_of(directory: Path, facts: Mapping[str, Any]) -> Path:
    """Name the file whose content these facts decide."""
    return directory / f"{digest([json.dumps(facts, sort_keys=True)])[:32]}.json"


class RememberedFile:
    """What is known where certain facts hold; where others do, that is in other files.

    kind: of figures, "trials" or "costs". facts: JSON. lost: how the warning begins where it cannot be written.
    """

    def __init__(self, kind: str, facts: dict[str, Any], lost: str):
        self.kind, self.facts, self.lost = kind, facts, lost

    def recall(self) -> dict[str, Any]:
        """Read what was kept; empty where the file is missing, damaged, of another format or of other facts."""
        try:
            kept = json.loads(self._file().read_text())
            return kept if (kept["format"], kept["facts"]) == (FORMAT, self.facts) else {}
        except (OSError, ValueError, LookupError, TypeError, RuntimeError):
            return {}

    def keep(self, **content: Any) -> None:
        """Replace the file whole, so that a reader sees the old or the new; where that fails, warn the first time."""
        text = json.dumps({"format": FORMAT, "facts": self.facts, **content}, indent=0)
        try:
            write_whole(self._file(), text)
        except (OSError, RuntimeError) as e:
            warning = f"{self.lost} ({e})"
            if warning not in _warned:
                _warned.add(warning)
                warnings.warn(warning, stacklevel=3)

    def _file(self) -> Path:
        return file_of(cache_directory(self.kind), self.facts)
