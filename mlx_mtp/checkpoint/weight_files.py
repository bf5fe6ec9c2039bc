"""Read the headers of a checkpoint's weight files, and choose the file from which each tensor is read.

The shard index only adds files with unusual names and chooses between copies of a tensor. Tensors that it lists but
no file contains, and unreadable files, are errors only if the model needs them (`check_complete`).
"""

import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from .files import Header, Tensor, data_begins, read_bytes, read_header
from .weight_names import TRUNK_FILES, find_index, is_sidecar, is_whole, read_index, shard_set, weight_names

PYTORCH, GGUF = "*.bin", "*.gguf"
COMPARED = 1 << 24  # bytes at a time


@dataclass(frozen=True)
class StoredTensors:
    """The tensors in a checkpoint's weight files.

    trunk, sidecars: tensors in the model's files, and in files of MTP heads. listed: the index, from tensor to file.
    absent: the part of the index whose tensors no readable file contains. unread, unread_sidecars: the error of each
    unreadable file. notes: warnings about the index and unused files.
    """

    path: Path
    trunk: Header
    sidecars: Header
    absent: dict[str, str] = field(default_factory=dict)
    unread: dict[Path, str] = field(default_factory=dict)
    unread_sidecars: dict[Path, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    listed: dict[str, str] = field(default_factory=dict)

    @property
    def index(self) -> str:
        """The index's name for messages."""
        return getattr(find_index(self.path), "name", "the index")

    def missing(self, name: str) -> str:
        """Return a message for a tensor in `absent`: its file is unreadable, missing, or lacks the tensor."""
        file = self.path / self.absent[name]
        if error := (self.unread | self.unread_sidecars).get(file):
            return error
        if not file.exists():
            return f"{file}: missing; {self.index} expects tensor {name} in it"
        return f"{file}: tensor {name} is missing; {self.index} expects it there"

    def lacking(self, names: Collection[str] = ()) -> str | None:
        """Return one message: about an unreadable trunk file, else a tensor of `absent`; None if there is neither.

        A tensor of `absent` is reported if it is in `names` (tensors that the model lacks) or its file is missing.
        """
        gone = [name for name, file in self.absent.items() if not (self.path / file).exists()]
        absent = [name for name in names if name in self.absent] + gone
        return next(iter(self.unread.values()), self.missing(absent[0]) if absent else None)

    def warn(self, stacklevel: int) -> None:
        """Warn about unused files, absent tensors and unreadable trunk files; sidecars are not reported.

        The caller has checked that the model needs none of them. stacklevel: of `warnings.warn`, in the caller.
        """
        texts = [*self.notes, *(f"{error}; the output does not depend on it" for error in self.unread.values())]
        if self.absent:
            name, file = next(iter(self.absent.items()))
            others = f" and {len(self.absent) - 1} more" if len(self.absent) > 1 else ""
            listed = f"lists tensor {name} in {file}{others}, which no file holds; the output does not depend on them"
            texts.append(f"{self.path / self.index}: {listed}")
        for text in texts:
            warnings.warn(text, stacklevel=stacklevel + 1)


def weight_files(path: Path, listed: Collection[str] = ()) -> list[str]:
    """Return the sorted names of a directory's weight files that exist, or are links, relative to it.

    listed: files that the index names, which count whatever their names are.
    """
    found = [*path.glob("*.safetensors"), *path.glob("mtp/*.safetensors"), *(path / name for name in listed)]
    names = [file.relative_to(path).as_posix() for file in found if file.exists() or file.is_symlink()]
    return weight_names(dict.fromkeys(names), listed)


def read_stored(path: Path, *, whole: bool = True) -> StoredTensors:
    """Return the tensors in a checkpoint's weight files, each once in the model's files and once in the sidecars.

    Data are read only to compare unlisted copies.

    whole: raise ValueError if there are no files, and list absent tensors and unreadable files in the result. False
    accepts missing files, lists no absent tensors, and raises ValueError for an unreadable file. ValueError also if
    two unlisted copies differ, or the index names a file outside the directory.
    """
    damage: list[str] = []
    listed = read_index(path, damage)
    names = weight_files(path, set(listed.values()))
    sidecars = [name for name in names if is_sidecar(name)]
    if whole and len(sidecars) == len(names):
        sidecars = []  # without other files, these contain the model
    headers: dict[str, Header] = {}
    unread: tuple[dict[Path, str], dict[Path, str]] = {}, {}
    for name in names:
        try:
            headers[name] = read_header([path / name])
        except ValueError as e:
            if not whole:
                raise
            unread[name in sidecars][path / name] = str(e)
    if whole and not names:
        raise ValueError(_no_weights(path))
    trunk, notes = _current(path, {name: headers[name] for name in headers if name not in sidecars}, listed)
    found = _merged(path, trunk, listed)
    of_heads = _merged(path, {name: headers[name] for name in headers if name in sidecars}, listed)
    absent = {n: file for n, file in listed.items() if whole and n not in found and n not in of_heads}
    moved = sorted({file for name, file in listed.items() if name not in absent and not (path / file).exists()})
    if moved and whole:
        index = getattr(find_index(path), "name", "")
        notes.append(f"{path / moved[0]}: not there; {index} lists tensors in it, which were found in other files")
    return StoredTensors(path, found, of_heads, absent, *unread, (*damage, *notes), listed)


def _no_weights(path: Path) -> str:
    """Return the message for a directory without weight files; it mentions GGUF or PyTorch files there."""
    if file := next(iter(sorted(path.glob(GGUF))), None):
        return f"{path}: no {TRUNK_FILES} in it, but a GGUF file; name the file itself: {file}"
    if any(path.glob(PYTORCH)):
        return f"{path}: no {TRUNK_FILES} in it; weights in PyTorch's .bin format are not read: take safetensors"
    return f"{path}: no {TRUNK_FILES} in it"


def _current(path: Path, headers: dict[str, Header], listed: dict[str, str]) -> tuple[dict[str, Header], list[str]]:
    """Return (the headers without leftover shards of another conversion, a note for each dropped set).

    Leftover shards repeat tensors of the files in the index or, without such files, of a complete set of shards.
    """
    sets: dict[str, list[str]] = {}
    for name in headers:
        sets.setdefault(shard_set(name), []).append(name)
    used = {shard_set(file) for file in listed.values() if file in headers} or {
        key for key, names in sets.items() if is_whole(names)
    }
    known = {name for key in used for file in sets.get(key, ()) for name in headers[file]}
    left, notes = dict(headers), []
    for key, names in sets.items():
        numbered = key not in names or key == "model.safetensors"
        if key in used or not numbered or not any(known & headers[name].keys() for name in names):
            continue
        left = {name: header for name, header in left.items() if name not in names}
        notes.append(f"{path / names[0]}: not used; it repeats tensors of {', '.join(sorted(used))}")
    return left, notes


def _merged(path: Path, headers: dict[str, Header], listed: dict[str, str]) -> Header:
    """Return each tensor once, from the index's file, else from the first; ValueError if unlisted copies differ."""
    copies: dict[str, dict[str, Tensor]] = {}
    for file, header in headers.items():
        for name, tensor in header.items():
            copies.setdefault(name, {})[file] = tensor
    found: Header = {}
    begins: dict[Path, dict[str, int]] = {}
    for name, tensors in copies.items():
        found[name] = tensors.get(listed.get(name, ""), next(iter(tensors.values())))
        if len(tensors) > 1 and listed.get(name) not in tensors:
            for a, b in pairwise(tensors.values()):
                if not _same(name, a, b, begins):
                    raise ValueError(f"{b.file}: tensor {name} is in {a.file.relative_to(path)}, too, and differs")
    return found


def _same(name: str, a: Tensor, b: Tensor, begins: dict[Path, dict[str, int]]) -> bool:
    """Return whether two files' copies of a tensor are equal, bit for bit; ValueError if a file is truncated.

    begins: by file, the offsets of its tensors' data; files that it lacks are added.
    """
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    for file in {a.file, b.file} - begins.keys():
        begins[file] = data_begins(file)
    pieces = (read_bytes(tensor, begins[tensor.file][name], COMPARED) for tensor in (a, b))
    return all(x == y for x, y in zip(*pieces, strict=True))
