"""Find the transcoding of a GGUF file in the user's cache folder, or create it."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ...machine.errors import one_line
from ...machine.paths import expanded
from ...machine.progress import report_progress
from ...machine.remembered import cache_directory
from ..convert_writer import Progress
from ..files import SMALL_FILES, resolve
from ..smollm2 import named_checkpoint
from .convert import SIDECAR, Prepared, copied_files, prepare, transcode
from .header import split_names
from .plan import GGUFOptions

FORMAT = 1  # another number invalidates the cache
KIND = "gguf"
CONFIGS = ("config.json", "generation_config.json")  # what `read_config` reads
WHOLE = 1 << 25  # first bytes of a file, with the header, which are all hashed
SAMPLES, SAMPLE = 256, 1 << 16


def is_gguf(path: Any) -> bool:
    """Return whether a path ends in .gguf and is no directory; the file need not exist."""
    return str(path).endswith(".gguf") and not expanded(path).is_dir()


def find_checkpoint(path_or_repo: str | Path, revision: str | None = None, *, code: bool = False) -> Path:
    """Return the local directory of a checkpoint, downloaded if needed; of a GGUF file, the cached transcoding.

    The transcoding is created if it is missing. revision, code: of a download, ignored for a GGUF file; code: also
    download the checkpoint's Python files. ValueError if there is no such checkpoint, or the GGUF file cannot be
    transcoded.
    """
    path = path_or_repo if is_gguf(path_or_repo) else named_checkpoint(path_or_repo, revision, code=code)
    return cached(path) if is_gguf(path) else Path(path)


def find_heads(mtp_path: str | Path | None, target: Path) -> str | Path | None:
    """Return `mtp_path` or, if it is a GGUF file, the path of a safetensors file with its transcoded heads.

    The heads are transcoded for the checkpoint in the directory `target`, if the cache has no such file yet;
    ValueError if they cannot be. Another path, or None, is returned unchanged and need not exist.
    """
    if mtp_path is None or not is_gguf(mtp_path):
        return mtp_path
    return cached(mtp_path, heads_for=target) / SIDECAR


def cached(
    file: str | Path,
    options: GGUFOptions | None = None,
    *,
    config_from: str | Path | None = None,
    heads_for: Path | None = None,
    announce: Callable[[Prepared, Path], None] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the cached directory of a GGUF file's transcoding; create it if it is missing.

    Its name has a hash of the GGUF file, the options, and a hash of the other files that the transcoding reads.

    options: without a Metal GPU, scales and values are float32 unless `dtype` is given, because a CPU multiplies
    quantized float16 weights thirty times as slowly.
    config_from: see `prepare`. heads_for: directory of a checkpoint for which only the file's heads are transcoded.
    announce: called
    with the plan and the directory before a transcoding. progress: called with the bytes written, and all bytes;
    None calls `report_progress` in MiB. ValueError for a file that cannot be transcoded.
    """
    options, path = options or GGUFOptions(), expanded(file)
    if options.dtype is None and heads_for is None and not mx.metal.is_available():
        options = replace(options, float32=True)
    slug = "-".join(filter(None, (options.plan, "f32" * options.float32, options.dtype)))
    if config_from is not None:
        config_from = resolve(config_from, files=SMALL_FILES)
        slug += f"-{_contents([config_from / CONFIGS[0], *copied_files(config_from)])}"
    if heads_for is not None:
        slug += f"-heads-{_contents([heads_for / name for name in CONFIGS])}"
    new = cache_directory(KIND) / f"{fingerprint(path)}-{slug}"
    if (new / "config.json").is_file() or (heads_for and (new / SIDECAR).is_file()):
        return new
    prepared = prepare(path, options, config_from=config_from, heads_for=heads_for)
    if announce is not None:
        announce(prepared, new)
    transcode(prepared, new, progress or (lambda done, of: report_progress("Transcoding", done >> 20, of >> 20)))
    return new


def _contents(files: list[Path]) -> str:
    """Return a hash of the names and contents of those files that exist; ValueError if one cannot be read."""
    digest = hashlib.sha256()
    for file in filter(Path.is_file, files):
        with one_line(f"{file}: cannot be read", (OSError,)):
            content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def fingerprint(path: Path) -> str:
    """Return a hash of a GGUF file's content; of a split file, of all its parts.

    Of a file of more than WHOLE bytes it covers the size, the time of the last change, the first bytes and samples of
    the rest. ValueError for a missing file.
    """
    digest = hashlib.sha256(str(FORMAT).encode())
    for file in split_names(path):
        if not file.is_file():
            raise ValueError(f"{file}: no such file")
        size = file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as f:
            digest.update(f.read(WHOLE))
            if size > WHOLE:  # a change may lie between the samples
                digest.update(str(os.fstat(f.fileno()).st_mtime_ns).encode())
            for i in range(SAMPLES if size > WHOLE else 0):
                f.seek(max(WHOLE, WHOLE + (size - WHOLE - SAMPLE) * i // (SAMPLES - 1)))
                digest.update(f.read(SAMPLE))
    return digest.hexdigest()[:24]
