"""Find the models on this machine: in the download cache, LM Studio's and mlx_mtp's folders, and given ones."""

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import scan_cache_dir
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import CacheNotFound

from ..machine.paths import expanded
from ..machine.remembered import cache_directory

OWN = "models"  # the kind of `cache_directory` that has models made by `mlx-mtp pull`
LM_STUDIO = ("~/.lmstudio/models", "~/.cache/lm-studio/models")
DEEPEST = 4  # levels below a given folder


class LocalModel(NamedTuple):
    """A model on this machine. name: of its hub repository, or of its directory or file. path: to give to --model."""

    name: str
    path: Path

    @property
    def short(self) -> str:
        """The last part of the name, in lower case."""
        return self.name.rpartition("/")[2].lower()


def places(folders: Iterable[Path] = ()) -> list[LocalModel]:
    """Return the models of the download cache, of LM Studio, of mlx_mtp and in `folders`, sorted by short name.

    Each path is returned once. A folder that is missing or cannot be read has none.
    """
    found = [*_downloaded(Path(HF_HUB_CACHE))]
    with contextlib.suppress(RuntimeError, ValueError):  # no home directory
        for folder in LM_STUDIO:
            found += below(expanded(folder), names=2)
        found += below(cache_directory(OWN), names=1)
    for folder in folders:
        found += below(expanded(folder), names=1)
    unique = {place.path.resolve(): place for place in reversed(found)}
    return sorted(unique.values(), key=lambda place: place.short)


def called(name: str, folders: Iterable[Path] = ()) -> Path | None:
    """Return the directory or GGUF file of the model with this short name, in any case; None if there is none.

    folders: searched in addition, as in `places`. ValueError, with their paths, if there are several.
    """
    found = [place for place in places(folders) if place.short == name.lower()]
    if len({place.path for place in found}) > 1:
        raise ValueError(f"{name}: several models; name one of {', '.join(str(place.path) for place in found)}")
    return found[0].path if found else None


def _downloaded(cache: Path) -> Iterator[LocalModel]:
    """Yield a `LocalModel` for each model of a download cache: its revision main, else the one modified last.

    Revisions without a config.json are left out. Nothing is yielded if there is no cache.
    """
    with contextlib.suppress(CacheNotFound):
        for repo in scan_cache_dir(cache).repos:
            found = [each for each in repo.revisions if (each.snapshot_path / "config.json").is_file()]
            if repo.repo_type == "model" and found:
                newest = max(found, key=lambda each: ("main" in each.refs, each.last_modified))
                yield LocalModel(repo.repo_id, newest.snapshot_path)


def below(folder: Path, *, names: int, depth: int = DEEPEST) -> Iterator[LocalModel]:
    """Yield a `LocalModel` for each directory with a config.json, and each GGUF file, in a folder.

    Subfolders are searched down to `depth` levels, except directories with a config.json. GGUF files with "mmproj" in
    the name, projectors of images, are left out. names: number of last path parts that make up a model's name.
    """
    for path in _entries(folder):
        name = "/".join(path.parts[-names:])
        if path.is_dir() and (path / "config.json").is_file():
            yield LocalModel(name, path)
        elif path.is_dir() and depth:
            yield from below(path, names=names, depth=depth - 1)
        elif path.suffix == ".gguf" and path.is_file() and "mmproj" not in path.name:
            yield LocalModel(name, path)


def _entries(folder: Path) -> list[Path]:
    """Return the entries of a folder without hidden ones, sorted; [] if it cannot be read."""
    with contextlib.suppress(OSError):
        return sorted(Path(entry.path) for entry in os.scandir(folder) if not entry.name.startswith("."))
    return []
