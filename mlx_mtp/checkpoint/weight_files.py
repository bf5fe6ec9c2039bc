"""Read the headers of a checkpoint's weight files, and decide which file each tensor is read from.

The files decide. The shard index adds files of other names, and chooses among copies of a tensor. What it lists
and no file holds, and files that cannot be read, matter only if the model needs them: `check_complete`.
"""

import warnings
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from .files import Header, Tensor, data_begins, read_bytes, read_header
from .weight_names import TRUNK_FILES, find_index, is_sidecar, is_whole, read_index, shard_set, weight_names

PYTORCH, GGUF = "*.bin", "*.gguf"
AT_ONCE = 1 << 24  # bytes that are compared


@dataclass(frozen=True)
class Stored:
    """The tensors of a checkpoint's weight files.

    trunk, sidecars: tensors of the model's files, and of files of MTP heads. listed: the index.
    absent: tensors in no file, and where the index lists them. unread, unread_sidecars: why a file cannot be read.
    notes: what is wrong with the index and which files are not used, for warnings.
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
        """Name the index in messages."""
        return getattr(find_index(self.path), "name", "the index")

    def missing(self, name: str) -> str:
        """Say what is wrong with the file of an absent tensor."""
        file = self.path / self.absent[name]
        if error := (self.unread | self.unread_sidecars).get(file):
            return error
        if not file.exists():
            return f"{file}: missing; {self.index} expects tensor {name} in it"
        return f"{file}: tensor {name} is missing; {self.index} expects it there"

    def lacking(self, names: Collection[str] = ()) -> str | None:
        """Say which file is to blame where the model needs more tensors than were found, `names` among them."""
        gone = [name for name, file in self.absent.items() if not (self.path / file).exists()]
        absent = [name for name in names if name in self.absent] + gone
        return next(iter(self.unread.values()), self.missing(absent[0]) if absent else None)

    def warn(self, stacklevel: int) -> None:
        """Warn of absent tensors and unreadable files, none of which the output depends on, and of unused files."""
        texts = [*self.notes, *(f"{error}; the output does not depend on it" for error in self.unread.values())]
        if self.absent:
            name, file = next(iter(self.absent.items()))
            others = f" and {len(self.absent) - 1} more" if len(self.absent) > 1 else ""
            listed = f"lists tensor {name} in {file}{others}, which no file holds; the output does not depend on them"
            texts.append(f"{self.path / self.index}: {listed}")
        for text in texts:
            warnings.warn(text, stacklevel=stacklevel + 1)


def weight_files(path: Path, listed: Collection[str] = ()) -> list[str]:
    """Name the weight files of a directory, relative to it."""
    found = [*path.glob("*.safetensors"), *path.glob("mtp/*.safetensors"), *(path / name for name in listed)]
    names = [file.relative_to(path).as_posix() for file in found if file.exists() or file.is_symlink()]
    return weight_names(dict.fromkeys(names), listed)


def read_stored(path: Path, *, whole: bool = True) -> Stored:
    """Read the headers of a checkpoint's weight files; ValueError where there are none, or two copies differ.

    whole: False for a directory of which files may be missing, and where none may be unreadable.
    """
    damage: list[str] = []
    listed = read_index(path, damage)
    names = weight_files(path, set(listed.values()))
    sidecars = [name for name in names if is_sidecar(name)]
    if whole and len(sidecars) == len(names):
        sidecars = []  # if no other file is there, these hold the model
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
    beside = _merged(path, {name: headers[name] for name in headers if name in sidecars}, listed)
    absent = {n: file for n, file in listed.items() if whole and n not in found and n not in beside}
    moved = sorted({file for name, file in listed.items() if name not in absent and not (path / file).exists()})
    if moved and whole:
        index = getattr(find_index(path), "name", "")
        notes.append(f"{path / moved[0]}: not there; {index} lists tensors in it, which were found in other files")
    return Stored(path, found, beside, absent, *unread, (*damage, *notes), listed)


def _no_weights(path: Path) -> str:
    """Say which files there are instead."""
    if file := next(iter(sorted(path.glob(GGUF))), None):
        return f"{path}: no {TRUNK_FILES} in it, but a GGUF file; name the file itself: {file}"
    if any(path.glob(PYTORCH)):
        return f"{path}: no {TRUNK_FILES} in it; weights in PyTorch's .bin format are not read: take safetensors"
    return f"{path}: no {TRUNK_FILES} in it"


def _current(path: Path, headers: dict[str, Header], listed: dict[str, str]) -> tuple[dict[str, Header], list[str]]:
    """Leave out shards of another conversion that were left in the directory; returns what was decided, too.

    They repeat tensors of files that the index lists, or of the only set of shards that is whole.
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
    """Choose one of the copies of each tensor: the index's, else any. ValueError if the others differ from it."""
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
    """Compare what two files hold of a tensor, bit for bit; where data begin in a file is added to `begins`."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    for file in {a.file, b.file} - begins.keys():
        begins[file] = data_begins(file)
    pieces = (read_bytes(tensor, begins[tensor.file][name], AT_ONCE) for tensor in (a, b))
    return all(x == y for x, y in zip(*pieces, strict=True))
