"""Fetch a repository of the hub as a directory of holes: small files, tensors' headers, and none of their data."""

import contextlib
import json
import struct
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download

from ..machine.errors import first_line
from .files import SIDECAR_FILES, TRUNK_FILES

SMALL = ("config.json", "generation_config.json", "hf_quant_config.json", "*.safetensors.index.json")
AT_ONCE = 8  # headers that are fetched side by side


@contextlib.contextmanager
def headers_only(repo: str, revision: str | None = None) -> Iterator[Path]:
    """Make a directory that looks like the checkpoint from outside its tensors, and is gone when the block ends.

    Each file has the size it has on the hub but takes no room: what follows its header is a hole. Raises ValueError,
    in one line, where the repository cannot be reached or is none.
    """
    with tempfile.TemporaryDirectory(prefix="mlx-mtp-") as name:
        try:
            _fetch(HfApi(), repo, revision, Path(name))
        except Exception as e:
            raise ValueError(f"{repo}: no such directory, and no headers from the hub: {first_line(e)}") from e
        yield Path(name)


def downloaded(repo: str, revision: str | None = None) -> Path | None:
    """Find the directory of a repository that was downloaded with its weights; None where it was not."""
    try:
        path = Path(snapshot_download(repo, revision=revision, local_files_only=True))
    except Exception:  # of many kinds: not there, no such name, no cache
        return None
    return path if any(path.glob(TRUNK_FILES)) else None


def _fetch(api: HfApi, repo: str, revision: str | None, path: Path) -> None:
    info = api.model_info(repo, revision=revision)
    names = [file.rfilename for file in info.siblings or []]
    for name in names:
        if "/" not in name and any(fnmatch(name, pattern) for pattern in SMALL):
            cached = api.hf_hub_download(repo, name, revision=info.sha)
            (path / name).write_bytes(Path(cached).read_bytes())
    patterns = (TRUNK_FILES, *SIDECAR_FILES)  # in which, as for `Path.glob`, a "*" is within one directory
    wanted = [n for n in names if any(fnmatch(n, p) and n.count("/") == p.count("/") for p in patterns)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda name: _write(api, repo, info.sha, path, name), wanted))


def _write(api: HfApi, repo: str, revision: str | None, path: Path, name: str) -> None:
    """Write one file's header, and a hole of its data's size."""
    file = path / name
    found = api.parse_safetensors_file_metadata(repo, name, revision=revision)
    header: dict = {"__metadata__": {key: str(value) for key, value in found.metadata.items()}}
    for tensor, entry in found.tensors.items():
        header[tensor] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": entry.data_offsets}
    text = json.dumps(header).encode()
    end = max((entry.data_offsets[1] for entry in found.tensors.values()), default=0)
    file.parent.mkdir(exist_ok=True)
    with file.open("wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.truncate(8 + len(text) + end)
