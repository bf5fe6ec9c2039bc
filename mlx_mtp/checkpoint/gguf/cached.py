"""Find the MLX checkpoint of a GGUF file in the user's cache, and make it where there is none."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...machine.progress import report_progress
from ...machine.remembered import cache_directory
from ..files import read_config, resolve
from .convert import SIDECAR, Prepared, prepare, transcode
from .header import split_names
from .plan import Options
from .write import Progress

FORMAT = 1  # of what is cached; another number makes it anew
KIND = "gguf"
WHOLE = 1 << 25  # bytes at a file's begin that are always hashed: they have the header
SAMPLES, SAMPLE = 256, 1 << 16
Announce = Callable[[Prepared, Path], None]


def is_gguf(path: Any) -> bool:
    """Return whether a path is, by its name, a GGUF file."""
    return str(path).endswith(".gguf") and not Path(path).expanduser().is_dir()


def find_checkpoint(path_or_repo: str | Path, revision: str | None = None, *, code: bool = False) -> Path:
    """Find the directory of a checkpoint as `resolve` does; of a GGUF file, that of its transcoding."""
    return cached(path_or_repo) if is_gguf(path_or_repo) else resolve(path_or_repo, revision, code=code)


def find_heads(mtp_path: str | Path | None, target: Path) -> str | Path | None:
    """Return where heads are: of a GGUF file, the transcoding of its heads for the checkpoint `target`."""
    if mtp_path is None or not is_gguf(mtp_path):
        return mtp_path
    layers = read_config(target)
    layers = (layers | layers.get("text_config", {})).get("num_hidden_layers")
    return cached(mtp_path, heads_for=target, suffix=f"-heads-{layers}") / SIDECAR


def cached(
    file: str | Path,
    options: Options | None = None,
    *,
    config_from: str | Path | None = None,
    heads_for: Path | None = None,
    suffix: str = "",
    announce: Announce | None = None,
    progress: Progress | None = None,
) -> Path:
    """Return the directory of a file's transcoding, named by the file's fingerprint; make it where it is missing.

    heads_for: directory of the checkpoint that only the file's heads are wanted for. announce: called before it is
    made. Raises ValueError.
    """
    options, path = options or Options(), Path(file).expanduser()
    slug = "-".join(filter(None, (options.plan, "f32" * options.float32, options.dtype)))
    if config_from is not None:
        slug += "-" + hashlib.sha256(str(config_from).encode()).hexdigest()[:8]
    new = cache_directory(KIND) / f"{fingerprint(path)}-{slug}{suffix}"
    if (new / "config.json").is_file() or (heads_for and (new / SIDECAR).is_file()):
        return new
    prepared = prepare(path, options, config_from=config_from, heads_for=heads_for)
    if announce is not None:
        announce(prepared, new)
    transcode(prepared, new, progress or _tell)
    return new


def _tell(done: int, total: int) -> None:
    report_progress("Transcoding", done >> 20, total >> 20)


def fingerprint(path: Path) -> str:
    """Return a hash of a file's size, its beginning and pieces of the rest; of all splits where it is one."""
    files = split_names(path)
    digest = hashlib.sha256(str(FORMAT).encode())
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file}: no such file")
        size = file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as f:
            digest.update(f.read(WHOLE))
            for i in range(SAMPLES if size > WHOLE else 0):
                f.seek(max(WHOLE, WHOLE + (size - WHOLE - SAMPLE) * i // (SAMPLES - 1)))
                digest.update(f.read(SAMPLE))
    return digest.hexdigest()[:24]
