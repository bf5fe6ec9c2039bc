"""Choose a checkpoint's weight files by name, and read its shard index."""

import json
import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from ..machine.errors import first_line
from .file_sizes import check_count, check_size

TRUNK_FILES = "model*.safetensors"
SIDECAR_FILES = ("mtp*.safetensors", "mtp/*.safetensors", "model-mtp*.safetensors", "model_mtp*.safetensors")
VISION_FILE = "vision.safetensors"  # of a vision tower that was written on its own
INDEX = "model.safetensors.index.json"
INDEXES = "*.safetensors.index.json"
ORIGINAL = "consolidated"  # prefix of a second copy, whose tensors have the authors' training names
NOT_WEIGHTS = re.compile(r"(.*_)?adapters?(_model)?\.|optimizer|scheduler|(.*[-_.])?mmproj|training")
NUMBERED = re.compile(r"(.*?)\d+-of-(\d+)\.safetensors")


def weight_names(names: Iterable[str], listed: Collection[str] = ()) -> list[str]:
    """Return, sorted, the weight files among a checkpoint's files: those in the index (`listed`), and usual names.

    If these are sidecars only, or none, every other safetensors file at the top level is one, except adapters and the
    like; "consolidated" files only if there are no others.
    """
    names = [name for name in names if name.endswith(".safetensors")]
    found = {name for name in names if name in listed or _matches(name, TRUNK_FILES) or is_sidecar(name)}
    if all(is_sidecar(name) for name in found):
        others = [name for name in names if "/" not in name and name not in found and not NOT_WEIGHTS.match(name)]
        found.update([name for name in others if not name.startswith(ORIGINAL)] or others)
    return sorted(found)


def is_sidecar(name: str) -> bool:
    """Return whether a file with this name contains MTP heads only."""
    return any(_matches(name, pattern) for pattern in SIDECAR_FILES)


def shard_set(name: str) -> str:
    """Return a shard's name without its number, which all shards of a conversion share; another file's own name."""
    match = NUMBERED.fullmatch(name)
    return f"{match[1]}#-of-{int(match[2])}" if match else name


def is_whole(names: Collection[str]) -> bool:
    """Return whether the files of one `shard_set` are complete: there are N or more, named "...-of-N.safetensors".

    A file without such a name is complete alone.
    """
    match = NUMBERED.fullmatch(next(iter(names)))
    return match is None or len(names) >= int(match[2])  # numbers from 0 to N are N + 1 files


def find_index(path: Path) -> Path | None:
    """Return a directory's shard index, None if there is none; the usual name is preferred to other names."""
    found = sorted(path.glob(INDEXES), key=lambda file: (file.name.startswith(ORIGINAL), file.name))
    return path / INDEX if (path / INDEX).exists() else next(iter(found), None)


def read_index(path: Path, notes: list[str] | None = None) -> dict[str, str]:
    """Return the file of each tensor in the shard index; empty if it is missing or damaged.

    notes: list to which a message about damage is appended. Raises ValueError for a file outside the directory.
    """
    index = find_index(path)
    if index is None:
        return {}
    try:
        check_size(index)
        listed = json.loads(index.read_text())["weight_map"]
        check_count(len(listed), index)
        files = set(listed.values())
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as e:
        if notes is not None:
            notes.append(f"{index}: damaged ({first_line(e)}) and not used")
        return {}
    for file in files:
        parts = PurePosixPath(file).parts if isinstance(file, str) else ()
        if not parts or ".." in parts or parts[0] == "/" or "\0" in file:
            raise ValueError(f"{index}: {file!r} is not the name of a file inside this directory")
    return listed


def _matches(name: str, pattern: str) -> bool:
    """Return whether a name matches as in `Path.glob`: a "*" does not match a "/"."""
    return fnmatch(name, pattern) and name.count("/") == pattern.count("/")
