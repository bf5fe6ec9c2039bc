"""Small JSON files about one machine in the user's cache: where they are, and what names them."""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx


def machine() -> dict[str, Any]:
    """The facts of this machine that times depend on."""
    device = mx.device_info()
    facts = {name: device.get(name) for name in ("device_name", "architecture", "memory_size")}
    return {**facts, "system": f"{platform.system()} {platform.release()}"}


def cache_directory(kind: str) -> Path:
    """Where files of a kind are kept: MLX_MTP_CACHE, else in the user's cache; RuntimeError without a home."""
    if chosen := os.environ.get("MLX_MTP_CACHE"):
        return Path(chosen).expanduser() / ("" if kind == "trials" else kind)
    usual = "Library/Caches" if sys.platform == "darwin" else ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / usual) / "mlx_mtp" / kind


def file_of(directory: Path, facts: Mapping[str, Any]) -> Path:
    """The file whose content these facts decide."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return directory / f"{digest[:32]}.json"
