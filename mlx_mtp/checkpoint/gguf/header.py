"""Read the header of a GGUF file, or of all parts of a split file: metadata, and the table of tensors.

Lengths, counts and offsets are checked against the file's size before memory is allocated. Sources: ggml's
`docs/gguf.md`, and the `gguf` package, whose table of block sizes is used.
"""

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...machine.errors import install
from ...machine.paths import expanded
from ...models.gguf.meta import shown

MAGIC, VERSIONS = b"GGUF", (2, 3)
SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
MAX_SPLITS, MAX_DIMENSIONS, MAX_NESTED = 1000, 4, 2
MAX_ITEMS = 1 << 21  # of all arrays together, so that short strings cannot fill the memory
MAX_PAIRS, MAX_TENSORS = 1 << 14, 1 << 16  # of a file: each is read in Python; a part of a split file counts alone
MAX_VALUES = 1 << 45  # of one tensor
STRING, ARRAY = 8, 9
SCALARS = dict(enumerate("BbHhIif?")) | dict(zip((10, 11, 12), "Qqd", strict=True))  # as `struct` names them


@dataclass(frozen=True)
class Entry:
    """A tensor of a GGUF file: shape [rows, ..., columns], its type's name, and its data's offset in the file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: str
    begin: int
    nbytes: int

    def blocks(self) -> np.ndarray:
        """Return the data as a memory map, uint8 [product of all dimensions but the last, bytes of a row]."""
        rows = math.prod(self.shape[:-1])
        return np.memmap(self.file, np.uint8, "r", self.begin, (rows, self.nbytes // rows))


@dataclass(frozen=True)
class GGUFContents:
    """The files of a GGUF file (one unless it is split), the first file's metadata, and the tensors of all files."""

    files: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, Entry]

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files)


def read(file: str | Path) -> GGUFContents:
    """Return the metadata and table of tensors of a GGUF file; for any part of a split file, those of the whole.

    The tensors' data are not read. ValueError for a missing, damaged or unsupported file, a missing part or one of
    another file, or without the gguf package.
    """
    path = expanded(file)
    first = _read_one(path)
    files = _splits(path, first)
    if len(files) == 1:
        return first
    parts = [first if part == path else _read_one(part) for part in files]
    tensors: dict[str, Entry] = {}
    for number, part in enumerate(parts):
        if (_split(part, "no", -1), _split(part, "count")) != (number, len(files)):
            needed = f"split.no {number} and split.count {len(files)}"
            raise ValueError(f"{files[number]}: its metadata lacks {needed}, which a part with this name needs")
        if repeated := sorted(tensors.keys() & part.tensors.keys()):
            raise ValueError(f"{files[number]}: tensor {repeated[0]} is in {tensors[repeated[0]].file.name}, too")
        tensors |= part.tensors
    expected = _split(parts[0], "tensors.count", len(tensors))
    if expected != len(tensors):
        stated = shown(parts[0].metadata["split.tensors.count"])
        raise ValueError(f"{path}: its splits hold {len(tensors)} tensors; its split.tensors.count is {stated}")
    return GGUFContents(tuple(files), parts[0].metadata, tensors)


def _split(part: GGUFContents, key: str, default: int = 1) -> int:
    """Return the integer `split.<key>` of a part's metadata; `default` without that key, -1 for another value."""
    value = part.metadata.get(f"split.{key}", default)
    return value if type(value) is int else -1


def _splits(path: Path, first: GGUFContents) -> list[Path]:
    """Return the paths of all parts of a GGUF file, by part number. first: the content of the file `path`, any part.

    ValueError if a part is missing, the file's name does not fit the number of parts, or split.count is not an
    integer from 0 to MAX_SPLITS.
    """
    count = _split(first, "count")
    if not 0 <= count <= MAX_SPLITS:
        stated = shown(first.metadata["split.count"])
        raise ValueError(f"{path}: split.count is {stated}; allowed are integers from 0 to {MAX_SPLITS}")
    files = split_names(path)
    if count <= 1:
        if len(files) > 1:  # `fingerprint` includes all files of the name
            named = f"one of {len(files)} splits by its name"
            raise ValueError(f"{path}: {named}, but its split.count is {count}; rename it")
        return [path]
    if len(files) != count:
        ends = f"rename them, in order, to end in -00001-of-{count:05d}.gguf and so on"
        raise ValueError(f"{path}: one of {count} splits; {ends}")
    if missing := [file for file in files if not file.is_file()]:
        raise ValueError(f"{missing[0]}: not found; {path.name} is one of {count} splits, which are all needed")
    return files


def split_names(path: Path) -> list[Path]:
    """Return the paths of all parts of a split file, by part number, from the path of one part.

    [path] for a name of another form, or unless 1 <= part number <= number of parts <= MAX_SPLITS in the name. The
    files need not exist.
    """
    match = SPLIT.fullmatch(path.name)
    if not match or not 1 <= int(match[2]) <= (count := int(match[3])) <= MAX_SPLITS:
        return [path]
    return [path.with_name(f"{match[1]}-{i + 1:05d}-of-{count:05d}.gguf") for i in range(count)]


def _read_one(path: Path) -> GGUFContents:
    if not path.is_file():  # opening a pipe would block
        raise ValueError(f"{path}: no such file")
    size = path.stat().st_size
    if size < 24:
        raise ValueError(f"{path}: not a GGUF file (it has {size} bytes)")
    with path.open("rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as data:
        reader = _Reader(path, data)
        try:
            metadata, count = reader.metadata()
            tensors = reader.tensors(count, metadata)
        except (struct.error, UnicodeDecodeError, OverflowError) as e:
            raise ValueError(f"{path}: truncated or damaged ({e})") from None
    return GGUFContents((path,), metadata, tensors)


def block_sizes(path: Path) -> dict[int, tuple[str, int, int]]:
    """Return, by a GGUF type's number, (its name, values of a block, bytes of a block).

    ValueError, with `path`, if the gguf package is not installed.
    """
    try:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        raise ValueError(f"{path}: to read GGUF files, gguf is missing: {install('gguf')}") from None
    return {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in GGMLQuantizationType}


class _Reader:
    """A reader of a mapped GGUF file, in which lengths and counts that exceed the rest of the file are errors.

    Its methods advance the position. For damage they raise ValueError, or another error that `_read_one` converts.
    """

    def __init__(self, path: Path, data: Any):
        self.path, self.data, self.at, self.items = path, data, 0, 0

    def metadata(self) -> tuple[dict[str, Any], int]:
        """Read and return (all metadata, the number of tensors)."""
        if self.data[:4] != MAGIC:
            raise ValueError(f"{self.path}: not a GGUF file (it begins with {bytes(self.data[:4])!r})")
        self.at = 4
        version = self.scalar("I")
        if version not in VERSIONS:
            swapped = " (big-endian)" if version & 0xFFFF == 0 else ""
            raise ValueError(f"{self.path}: GGUF version {version}{swapped} is not supported; supported are 2 and 3")
        tensors, pairs = self.count(24, MAX_TENSORS), self.count(13, MAX_PAIRS)
        found: dict[str, Any] = {}
        for _ in range(pairs):
            key = self.string()
            if key in found:
                raise ValueError(f"{self.path}: metadata key {key!r} is there twice")
            found[key] = self.value(self.scalar("I"), 0)
        return found, tensors

    def tensors(self, count: int, metadata: dict[str, Any]) -> dict[str, Entry]:
        """Read and return the table of tensors; ValueError if data overlap, exceed the file or are misplaced."""
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise ValueError(f"{self.path}: general.alignment is {alignment!r}; allowed are 8, 16, ... 2^20")
        kinds, found = block_sizes(self.path), {}
        for _ in range(count):
            name = self.string()
            if name in found:
                raise ValueError(f"{self.path}: tensor {name!r} is there twice")
            found[name] = self.entry(name, kinds)
        begin, end = -(-self.at // alignment) * alignment, 0
        for name, entry in sorted(found.items(), key=lambda pair: pair[1].begin):
            if entry.begin % alignment or entry.begin < end or begin + entry.begin + entry.nbytes > len(self.data):
                aligned = f"or its data are not aligned to {alignment} bytes"
                raise ValueError(f"{self.path}: tensor {name!r} is truncated or overlaps another, {aligned}")
            end = entry.begin + entry.nbytes
        return {name: Entry(e.file, name, e.shape, e.kind, begin + e.begin, e.nbytes) for name, e in found.items()}

    def entry(self, name: str, kinds: dict[int, tuple[str, int, int]]) -> Entry:
        """Read and return one entry of the table of tensors; its `begin` is relative to the data's begin.

        kinds: the result of `block_sizes`. ValueError for a type or shape that is not allowed.
        """
        dimensions = self.scalar("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"{self.path}: tensor {name!r} has {dimensions} dimensions; allowed are 1 to 4")
        shape = tuple(self.scalar("Q") for _ in range(dimensions))[::-1]
        kind, offset = self.scalar("I"), self.scalar("Q")
        if kind not in kinds:
            raise ValueError(f"{self.path}: tensor {name!r} has type {kind}, which the gguf package does not have")
        label, values, nbytes = kinds[kind]
        total = math.prod(shape)
        if not 0 < total <= MAX_VALUES or shape[-1] % values:
            needs = f"{label} needs rows of whole blocks of {values} values, and 1 to 2^45 values in all"
            raise ValueError(f"{self.path}: tensor {name!r} has shape {shape}; {needs}")
        return Entry(self.path, name, shape, label, offset, total // values * nbytes)

    def scalar(self, form: str) -> Any:
        """Read and return one little-endian number. form: its character in `struct`, such as "I", no byte order."""
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize(form)
        return value

    def count(self, size: int, most: int | None = None) -> int:
        """Read and return a number of items of at least `size` bytes each; ValueError if the file is too short.

        most: maximum of the number.
        """
        value = self.scalar("Q")
        if value * size > len(self.data) - self.at:
            raise ValueError(f"{self.path}: truncated or damaged (it claims {value} entries)")
        if most is not None and value > most:
            raise ValueError(f"{self.path}: {value:,} entries in its header; allowed are {most:,}")
        return value

    def string(self, errors: str = "strict") -> str:
        begin = self.at + 8
        self.at = begin + self.count(1)
        return str(self.data[begin : self.at], "utf-8", errors)

    def value(self, kind: int, depth: int) -> Any:
        """Read and return one metadata value of a numbered type; arrays of numbers become NumPy arrays, others lists.

        kind: the type's number in GGUF. depth: number of arrays that contain the value. ValueError for an unknown
        type, deeper arrays than MAX_NESTED, or more than MAX_ITEMS values in all arrays read so far.
        """
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string("replace")
        if kind != ARRAY or depth >= MAX_NESTED:
            raise ValueError(f"{self.path}: truncated or damaged (metadata of type {kind} at array depth {depth})")
        inner = self.scalar("I")
        size = struct.calcsize(SCALARS[inner]) if inner in SCALARS else 8
        count = self.count(size)
        self.items += count
        if self.items > MAX_ITEMS:
            raise ValueError(f"{self.path}: arrays in its metadata have more than {MAX_ITEMS} values in all")
        if inner in SCALARS:
            begin, self.at = self.at, self.at + count * size
            return np.frombuffer(self.data[begin : self.at], np.dtype(SCALARS[inner]).newbyteorder("<"))
        return [self.value(inner, depth + 1) for _ in range(count)]
