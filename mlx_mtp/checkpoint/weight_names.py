"""Choose a checkpoint's weight files by their names, in a directory or in a repository's list of files."""

import json
import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from ..machine.errors import first_line

TRUNK_FILES = "model*.safetensors"
SIDECAR_FILES = ("mtp*.safetensors", "mtp/*.safetensors", "model-mtp*.safetensors", "model_mtp*.safetensors")
INDEX = "model.safetensors.index.json"
INDEXES = "*.safetensors.index.json"
ORIGINAL = "consolidated"  # begins the names of a second copy, in the names that its authors train with
NOT_WEIGHTS = re.compile(r"(.*_)?adapters?(_model)?\.|optimizer|scheduler|(.*[-_.])?mmproj|training")
NUMBERED = re.compile(r"(.*?)\d+-of-(\d+)\.safetensors")


def weight_names(names: Iterable[str], listed: Collection[str] = ()) -> list[str]:
    """Choose the weight files among a checkpoint's files; `listed` are the files that its index names.

    They are those of the index and those of usual names. Without any other than sidecars, they are all safetensors
    files at the top that can be a model's, the original copy only if it is the only one.
    """
    names = [name for name in names if name.endswith(".safetensors")]
    found = {name for name in names if name in listed or _matches(name, TRUNK_FILES) or is_sidecar(name)}
    if all(is_sidecar(name) for name in found):
        others = [name for name in names if "/" not in name and name not in found and not NOT_WEIGHTS.match(name)]
        found.update([name for name in others if not name.startswith(ORIGINAL)] or others)
    return sorted(found)


def is_sidecar(name: str) -> bool:
    """Return whether a file of this name is expected to hold MTP heads and nothing else."""
    return any(_matches(name, pattern) for pattern in SIDECAR_FILES)


def shard_set(name: str) -> str:
    """Return what the names of one conversion's shards have in common; of another file, its name."""
    match = NUMBERED.fullmatch(name)
    return f"{match[1]}#-of-{int(match[2])}" if match else name


def is_whole(names: Collection[str]) -> bool:
    """Return whether the files of a `shard_set` are as many as their names say."""
    match = NUMBERED.fullmatch(next(iter(names)))
    return match is None or len(names) >= int(match[2])  # some count from 0 and have one more


def find_index(path: Path) -> Path | None:
    """Return a directory's shard index; where there are several, the usual name is preferred to other names."""
    found = sorted(path.glob(INDEXES), key=lambda file: (file.name.startswith(ORIGINAL), file.name))
    return path / INDEX if (path / INDEX).exists() else next(iter(found), None)


def read_index(path: Path, notes: list[str] | None = None) -> dict[str, str]:
    """Read the file of each tensor from the shard index; empty where there is none, or it is damaged (see `notes`).

    Raises ValueError for a file outside the directory.
    """
    index = find_index(path)
    if index is None:
        return {}
    try:
        listed = json.loads(index.read_text())["weight_map"]
        files = set(listed.values())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as e:
        if notes is not None:
            notes.append(f"{index}: damaged ({first_line(e)}) and not used")
        return {}
    for file in files:
        parts = PurePosixPath(file).parts if isinstance(file, str) else ()
        if not parts or ".." in parts or parts[0] == "/" or "\0" in file:
            raise ValueError(f"{index}: {file!r} is no file of this directory")
    return listed


def _matches(name: str, pattern: str) -> bool:
    """Match as `Path.glob` does: a "*" stands for characters of one directory's or file's name."""
    return fnmatch(name, pattern) and name.count("/") == pattern.count("/")
