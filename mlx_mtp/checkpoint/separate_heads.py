"""Find MTP heads in the file or directory `mtp_path`: a sidecar, another checkpoint, or a drafter of mlx-vlm's.

mlx-vlm's MTP drafters are a family's heads under other names; their model_type ends in `_mtp` (its
`speculative/drafters/*/split.py`).
"""

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from ..layers.mtp_spec import MTPSpec
from ..layers.with_heads import TUNED_PREFIX
from ..machine.paths import expanded
from .files import Header, read_header
from .weight_files import read_stored
from .weight_names import TRUNK_FILES

# mlx-vlm's names of a head's modules, and the names in checkpoints that store heads as layers after the target's.
SPLIT = ((r"^(model\.)?(mtp_block\.|mtp\.)?", ""), (r"^shared_head_norm\.", "shared_head.norm."))
SPLIT += ((r"^lm_head\.", "shared_head.head."),)


def read_separate_heads(port: ModuleType, layers: int, mtp_path: str | Path) -> Header:
    """Return the head tensors in `mtp_path` for a target with `layers` layers, by the checkpoint's names.

    Of a checkpoint's directory (with config.json), or a file model*.safetensors in it, only heads' tensors are
    returned, and if there are some of `tune-heads --new`, only these; ValueError if it has none. Of mlx-vlm's
    drafters and other files, such as sidecars, all tensors are returned, unchecked; ValueError if there is no
    file, or a damaged one.
    """
    given, spec = expanded(mtp_path), port.Model.SPEC
    if is_split(given):
        return {_checkpoint_name(name, spec, layers): replace(t, stored=name) for name, t in _read(given).items()}
    folder = given if given.is_dir() else given.parent
    if not (folder / "config.json").is_file() or (folder != given and not given.match(TRUNK_FILES)):
        return _read(given)
    found = _read(given)
    if folder == given:
        stored = read_stored(given, whole=False)
        found = stored.trunk | stored.sidecars
    heads = {name: tensor for name, tensor in found.items() if name.startswith(TUNED_PREFIX)}
    heads = heads or {name: tensor for name, tensor in found.items() if spec.locate(name, layers)}
    if not heads:
        raise ValueError(f"mtp_path={given}: none of its tensors is an MTP head's, expected {spec.place(layers)}")
    return heads


def is_split(path: Path) -> bool:
    """Return whether a directory's config.json describes MTP heads that mlx-vlm split off."""
    with suppress(OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return json.loads((path / "config.json").read_text())["model_type"].endswith("_mtp")
    return False


def _read(given: Path) -> Header:
    """Return the tensors of a file, or of the safetensors files directly in a directory.

    ValueError if there are none, or one is damaged.
    """
    files = sorted(given.glob("*.safetensors")) if given.is_dir() else [given]
    if not files or not files[0].exists():
        raise ValueError(f"mtp_path={given}: no such file, or a directory without .safetensors")
    return read_header(files)


def _checkpoint_name(name: str, spec: MTPSpec, layers: int) -> str:
    """Return the name in a checkpoint of a tensor that mlx-vlm's drafter stores as `name`.

    They are equal, unless the family stores heads as layers after the target's. layers: number of the target's.
    """
    if spec.numbered != "trunk":
        return name
    for pattern, new in SPLIT:
        name = re.sub(pattern, new, name)
    return f"model.layers.{layers}.{name}"
