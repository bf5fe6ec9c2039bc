"""Limit the sizes of a checkpoint's files that are read whole, before one is opened.

The limits exceed the sizes of the largest released files. Reading needs ten times a file's bytes of memory.
"""

from fnmatch import fnmatch
from pathlib import Path

MB = 10**6
DRAFT_VOCAB = 16 * MB  # bytes of a draft vocabulary, whatever its name
# (pattern of names, maximum bytes); the first that matches counts. Other files are not read whole.
LARGEST = (
    ("*.index.json", 40 * MB),
    ("*config.json", 4 * MB),
    ("chat_template.*", 2 * MB),
    ("*.jinja", 2 * MB),
    ("*token*.json", 128 * MB),
    ("vocab.*", 128 * MB),
    ("merges.txt", 128 * MB),
    ("*.model", 128 * MB),
    ("*.tiktoken", 128 * MB),
    ("draft_vocab.json", DRAFT_VOCAB),
)
MOST_HEADER = 8 * MB  # bytes of a safetensors file's header
MOST_TENSORS = 1 << 18  # of a checkpoint's files together, with the entries of their metadata


def check_sizes(directory: Path) -> None:
    """Raise ValueError for a file of a checkpoint's directory that exceeds its limit, or is a pipe or device."""
    for file in sorted(directory.iterdir()):
        if file.exists() and not (file.is_file() or file.is_dir()):  # opening a pipe would block
            raise ValueError(f"{file}: neither a file nor a directory; remove it from this directory")
        check_size(file)


def check_size(file: Path, most: int | None = None) -> None:
    """Raise ValueError if a file that exists has more than `most` bytes, by default the limit for its name."""
    of = "kind" if most else "name"
    most = most or next((most for pattern, most in LARGEST if fnmatch(file.name, pattern)), None)
    if most is not None and file.is_file() and (size := file.stat().st_size) > most:
        raise ValueError(f"{file}: {size:,} bytes; allowed are {most:,} in a file of this {of}")


def check_header(file: Path) -> None:
    """Raise ValueError if a safetensors file's header exceeds MOST_HEADER; damage is not detected."""
    with file.open("rb") as f:
        size = int.from_bytes(f.read(8), "little")
    if MOST_HEADER < size < file.stat().st_size:
        raise ValueError(f"{file}: its header has {size:,} bytes; allowed are {MOST_HEADER:,}")


def check_count(count: int, file: Path) -> None:
    """Raise ValueError if `count`, the number of entries in headers up to that of a file, exceeds MOST_TENSORS."""
    if count > MOST_TENSORS:
        raise ValueError(f"{file}: {count:,} entries up to this file; allowed are {MOST_TENSORS:,} in a checkpoint")
