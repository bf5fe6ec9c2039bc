"""Download a model from the hub, and state its size before."""

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.file_download import repo_folder_name

from ..machine.atomic import check_free
from ..machine.paths import expanded
from .convert import files_of_heads
from .files import SMALL_FILES, headers_only, not_fetched, resolve
from .inspect import inspect_checkpoint
from .weight_names import SIDECAR_FILES, weight_names


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
    cached = (n for n in files if isinstance(try_to_load_from_cache(repo, n, revision=revision), str))
    return Download(repo, files, heads, sum(files[name] for name in cached))


def fetch(plan: Download, revision: str | None = None, *, only_heads: bool = False) -> Path:
    """Download the planned files that are not in the download cache yet; return their directory.

    revision, only_heads: those given to `planned`. ValueError, one line, if the disk has too little space or the
    download fails.
    """
    check_free(Path(HF_HUB_CACHE) / repo_folder_name(repo_id=plan.repo, repo_type="model"), plan.total - plan.here)
    if not only_heads:
        return resolve(plan.repo, revision)
    return resolve(plan.repo, revision, files=(*SMALL_FILES, *SIDECAR_FILES, *plan.files))
