"""Cache measurements of this machine in JSON files whose names are a hash of the facts they depend on."""

import hashlib
import json
import os
import platform
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx

from .atomic import write_whole

FORMAT = 1  # version of all these files

_warned: set[str] = set()


def machine() -> dict[str, Any]:
    """Return the facts that identify this machine for measured times: device, architecture, memory and system.

    A fact that MLX does not report is None.
    """
    device = mx.device_info()
    facts = {name: device.get(name) for name in ("device_name", "architecture", "memory_size")}
    return {**facts, "system": f"{platform.system()} {platform.release()}"}


def digest(lines: Iterable[str]) -> str:
    """Return a hash of lines that does not depend on their order."""
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def cache_directory(kind: str = "trials") -> Path:
    """Return the directory for files of a kind, such as "trials"; the directory may not exist.

    MLX_MTP_CACHE, if it is set, is the directory of "trials" and contains those of other kinds; else all are in
    mlx_mtp in the user's cache folder. RuntimeError if the home directory is needed and unknown.
    """
    if chosen := os.environ.get("MLX_MTP_CACHE"):
        return Path(chosen).expanduser() / ("" if kind == "trials" else kind)
    usual = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / usual) / "mlx_mtp" / kind


def file_of(directory: Path, facts: Mapping[str, Any]) -> Path:
    """Return the path of the JSON file for these facts, which is named by their hash."""
    return directory / f"{digest([json.dumps(facts, sort_keys=True)])[:32]}.json"


def newest(kind: str) -> Iterator[Any]:
    """Yield the JSON values in the files of a kind, the newest file first; unreadable files are left out."""
    with suppress(OSError, RuntimeError):
        for file in sorted(cache_directory(kind).glob("*.json"), key=lambda file: -file.stat().st_mtime):
            with suppress(OSError, ValueError):
                yield json.loads(file.read_text())


class RememberedFile:
    """Measurements made under certain facts, in a file of their own.

    kind: argument of `cache_directory`. facts: JSON values. lost: the start of the warning if the file cannot be
    written.
    """

    def __init__(self, kind: str, facts: dict[str, Any], lost: str):
        self.kind, self.facts, self.lost = kind, facts, lost

    def recall(self) -> dict[str, Any]:
        """Return a dict of the stored content, with two more keys, "format" and "facts".

        {} if the file is missing, unreadable, damaged, of another format or of other facts.
        """
        try:
            kept = json.loads(self._file().read_text())
            return kept if (kept["format"], kept["facts"]) == (FORMAT, self.facts) else {}
        except (OSError, ValueError, LookupError, TypeError, RuntimeError):
            return {}

    def keep(self, **content: Any) -> None:
        """Replace the file's content atomically; if that fails, warn, once per process for the same text."""
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
