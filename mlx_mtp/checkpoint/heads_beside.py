"""List the tensors of heads that lie beside the target: in a sidecar, a checkpoint, or a directory of mlx-vlm's.

mlx-vlm's MTP drafters, whose model_type is a family's and `_mtp`, are that family's heads under other names (its
`speculative/drafters/*/split.py`).
"""

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from ..layers.mtp_spec import MTPSpec
from .files import TRUNK_FILES, Header, read_header, sidecar_files

# What mlx-vlm calls modules of a head that checkpoints have as a layer behind the target's.
SPLIT = ((r"^(model\.)?(mtp_block\.|mtp\.)?", ""), (r"^shared_head_norm\.", "shared_head.norm."))
SPLIT += ((r"^lm_head\.", "shared_head.head."),)


def read_heads_beside(port: ModuleType, path: Path, layers: int, mtp_path: str | Path | None) -> Header:
    """List what lies beside the target of `layers` layers at `path`, or in the file or directory `mtp_path`.

    Of a whole checkpoint only heads are listed. Raises ValueError where a given path holds none.
    """
    if mtp_path is None:
        return read_header(sidecar_files(path, None))
    given, spec = Path(mtp_path).expanduser(), port.Model.SPEC
    if is_split(given):
        return {_usual(name, spec, layers): replace(t, stored=name) for name, t in _read(given).items()}
    folder = given if given.is_dir() else given.parent
    if not (folder / "config.json").is_file() or (folder != given and not given.match(TRUNK_FILES)):
        return _read(given)
    files = [given] if folder != given else [*folder.glob(TRUNK_FILES), *sidecar_files(folder, None)]
    heads = {n: t for n, t in read_header(dict.fromkeys(sorted(files))).items() if spec.locate(n, layers)}
    if not heads:
        raise ValueError(f"mtp_path={given}: none of its tensors is an MTP head's, expected {spec.place(layers)}")
    return heads


def is_split(path: Path) -> bool:
    """Tell whether a directory is an MTP drafter of mlx-vlm's, by its config.json."""
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return json.loads((path / "config.json").read_text())["model_type"].endswith("_mtp")
    return False


def _read(given: Path) -> Header:
    return read_header(sidecar_files(given, given))


def _usual(name: str, spec: MTPSpec, layers: int) -> str:
    """Write the name that a tensor of mlx-vlm's has in a checkpoint."""
    if spec.numbered != "trunk":
        return name
    for pattern, new in SPLIT:
        name = re.sub(pattern, new, name)
    return f"model.layers.{layers}.{name}"
