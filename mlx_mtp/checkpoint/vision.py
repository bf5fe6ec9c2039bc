"""Find a checkpoint's vision tower by its tensors' names, check it by headers, and read it at the first picture."""

import hashlib
import json
import re
import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from types import ModuleType
from typing import Any, NamedTuple

import mlx.nn as nn
from mlx_lm.utils import infer_quant_config
from safetensors import safe_open

from ..machine.errors import first_line, one_line
from ..machine.memory import check_room
from ..machine.paths import expanded
from ..models.vision import find_tower, tower_names
from ..pictures.vision import Vision
from .cure import base_model
from .files import Header, data_begins, read_config, read_header, read_tensors, stored_types
from .parameters import check_numbers, named
from .report import size
from .sort_tensors import check_types
from .weight_files import StoredTensors, read_stored
from .weight_names import VISION_FILE

SETTINGS = "preprocessor_config.json"
SAMPLED = 64  # bytes per place in a tensor that the fingerprint covers
UNUSED = re.compile(r"(^|\.)(position_ids|inv_freq)$")  # computed here, stored by some exports
MISBUILT = (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError)
OF_CONFIG = ("vision_config", "image_token_id")


@dataclass(frozen=True)
class Sight:
    """The options of `load` for pictures.

    on: look for a vision tower, without which pictures are refused. path: the tower's file or directory; None for the
    checkpoint's own.
    """

    on: bool = True
    path: str | Path | None = None

    def check(self) -> None:
        """Raise ValueError for a `path` while `on` is False."""
        if self.path is not None and not self.on:
            raise ValueError(f"vision_path={self.path}: not together with vision=False")


BLIND = Sight(on=False)


class TowerFiles(NamedTuple):
    """A vision tower in files, none of whose weights is read.

    kind: the family's module in `models.vision`. tensors: headers, by the stored names. config: config.json with the
    tower's part. settings: the image processor's, None if no file has them. place: the tower's file or directory.
    """

    kind: ModuleType
    tensors: Header
    config: dict[str, Any]
    settings: dict[str, Any] | None
    place: Path

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def summary(self) -> str:
        """The tower's bytes, number of tensors and stored types in words, for the report."""
        kinds = ", ".join(stored_types(self.tensors))
        return f"{size(self.nbytes)} in {len(self.tensors):,} tensors, stored as {kinds}"


def find_tower_files(
    path: Path, config: dict, stored: StoredTensors | None, given: str | Path | None
) -> TowerFiles | None:
    """Return the vision tower of a checkpoint at `path`, None if its files have none or its family reads no pictures.

    stored: the checkpoint's weight files, which are searched before VISION_FILE in its directory; None without any.
    given: a file or directory that is searched instead; ValueError if it has no tower, or the family reads no
    pictures. ValueError also for a damaged file.
    """
    kind = find_tower(config)
    if kind is None:
        if given is not None:
            raise ValueError(f"vision_path={given}: omit it; {_no_family(config)}")
        return None
    if given is None:
        place = path
        tensors = _of_tower(kind, stored.trunk | stored.sidecars) if stored else {}
        if not tensors and (path / VISION_FILE).is_file():
            tensors, place = _of_tower(kind, read_header([path / VISION_FILE])), path / VISION_FILE
    else:
        place = expanded(given)
        tensors = _of_tower(kind, _read_given(place))
        if not tensors:
            raise ValueError(f"vision_path={given}: no tensor of a vision tower in it ({kind.PREFIXES[0]}*)")
    if not tensors:
        return None
    folder = place if place.is_dir() else place.parent
    other = read_config(folder) if given is not None and (folder / "config.json").is_file() else {}
    embedded = {} if place.is_dir() else _metadata(place)
    part = {name: source[name] for source in (config, other, embedded) for name in OF_CONFIG if name in source}
    return TowerFiles(kind, tensors, config | part, embedded.get("processor") or _settings(folder, path), place)


def usable_tower(
    path: Path, config: dict, stored: StoredTensors | None, sight: Sight, width: int
) -> tuple[TowerFiles | None, str]:
    """Return (a checkpoint's tower, "") or (None, the reason why the model reads no pictures).

    A tower that is found and cannot be used causes a warning, unless config.json has no vision_config; a ValueError
    instead if `sight.path` is given. width: the model's hidden size. No weights are read.
    """
    if not sight.on:
        return None, f"{path}: loaded without its vision tower; omit vision=False (--no-vision) to read pictures"
    try:
        tower = find_tower_files(path, config, stored, sight.path)
        if tower is not None:
            lazy_tower(tower, width)
    except ValueError as e:
        if sight.path is not None:
            raise
        if "vision_config" in config:  # without one, a text model's files have a tower left over
            warnings.warn(f"{first_line(e)}; pictures are refused", stacklevel=5)
        return None, first_line(e)
    return tower, "" if tower else _absent(path, config)


def open_vision(
    path: Path, config: dict, stored: StoredTensors | None, sight: Sight, width: int, embed: Any = None
) -> tuple[Any, str]:
    """Return (the `Vision` of a checkpoint, "") or (None, the reason); arguments and errors as in `usable_tower`.

    embed: returns the language model's embeddings [n, width] of tokens [n].
    """
    tower, reason = usable_tower(path, config, stored, sight, width)
    if tower is None:
        return None, reason
    mark = int(tower.kind.find_mark(tower.config))
    parts: dict[str, Any] = {
        "open_pixels": partial(_open_pixels, tower, path),
        "read": partial(_read, tower, width, embed),
        "fingerprint": partial(_fingerprint, tower),
        "written": tower.kind.find_written(tower.config),
    }
    return Vision(mark, tower.nbytes, tower.summary, **parts), ""


def vision_facts(config: dict, vision: Any, blind: str, ignored: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields "vision" and "ignored" of a `Report`; "ignored" is without patterns of the tower's tensors.

    vision, blind: the results of `open_vision` or `usable_tower`. ignored: patterns of the names of tensors that text
    decoding does not use.
    """
    kind = find_tower(config)
    if kind is None or vision is None:
        return {"vision": blind if kind or "vision_config" in config else "", "ignored": ignored}
    left = tuple(pattern for pattern in ignored if pattern.removesuffix("*") not in kind.PREFIXES)
    return {"vision": f"{vision.summary}; read at the first picture", "ignored": left}


def _no_family(config: dict) -> str:
    return f"model_type {config.get('model_type')!r} reads no pictures here; supported are {', '.join(tower_names())}"


def _absent(path: Path, config: dict) -> str:
    """Return why a checkpoint without a tower reads no pictures, and what to do."""
    if find_tower(config) is None:
        return f"{path}: {_no_family(config)}"
    command = f"mlx-mtp convert --hf-path {base_model(path)} --vision-only --vision-path {quote(str(path))}"
    return f"{path}: no vision tower in it; to add it: {command}"


def _of_tower(kind: ModuleType, header: Header) -> Header:
    return {name: tensor for name, tensor in header.items() if name.startswith(kind.PREFIXES)}


def _read_given(place: Path) -> Header:
    """Return the headers of a file's tensors, or of a directory's VISION_FILE, or else of its weight files.

    ValueError if there is no such file, or a damaged one.
    """
    if not place.is_dir():
        return read_header([place])
    if (place / VISION_FILE).is_file():
        return read_header([place / VISION_FILE])
    stored = read_stored(place, whole=False)
    return stored.trunk | stored.sidecars


def _metadata(file: Path) -> dict[str, Any]:
    """Return the facts of `embedded` in a file's metadata, {} without them; ValueError for a damaged file.

    They are the tower's part of config.json, and under "processor" the image processor's settings.
    """
    with one_line(f"{file}: truncated or damaged"), safe_open(file, "numpy") as f:
        return json.loads((f.metadata() or {}).get("vision", "{}"))


def _settings(*folders: Path) -> dict[str, Any] | None:
    """Return the image processor's settings in the first directory that has them, None without any.

    ValueError for a damaged file.
    """
    for folder in folders:
        for name, key in ((SETTINGS, None), ("processor_config.json", "image_processor")):
            if (folder / name).is_file():
                with one_line(f"{folder / name}: not usable"):
                    found = json.loads((folder / name).read_text())
                    found = found.get(key) if key else found
                    if found is not None and not isinstance(found, dict):
                        raise ValueError("expected an object")
                if found is not None:
                    return found
    return None


def write_settings(tower: TowerFiles, folder: Path) -> None:
    """Write the image processor's settings of a tower, if it has some, as the file SETTINGS into a directory."""
    if tower.settings is not None:
        (folder / SETTINGS).write_text(json.dumps(tower.settings, indent=2))


def embedded(tower: TowerFiles) -> dict[str, str]:
    """Return the metadata of a file with this tower alone: {"vision": JSON}.

    The JSON has the tower's part of config.json and, under "processor", the image processor's settings, if any.
    """
    part = {name: tower.config[name] for name in OF_CONFIG if name in tower.config}
    return {"vision": json.dumps(part | ({"processor": tower.settings} if tower.settings else {}))}


def lazy_tower(tower: TowerFiles, width: int | None) -> nn.Module:
    """Return the tower's module with lazy weights, quantized as they are stored.

    width: the model's hidden size, which the features must have; None is any. ValueError if config.json does not
    describe a tower of this width, or the tensors do not match the module's parameters in name and shape.
    """
    check_types(tower.tensors)
    source = f"{tower.place}: the vision tower cannot be built from config.json"
    try:
        module = tower.kind.Tower(tower.config)
        tower.kind.find_mark(tower.config)
        if width not in (module.width, None):
            raise ValueError(f"its features have {module.width} columns, the model's hidden size is {width}")
    except MISBUILT as e:
        missing = "it lacks " if isinstance(e, KeyError) else ""
        raise ValueError(f"{source} ({missing}{first_line(e)})") from e
    with one_line(f"{tower.place}: the vision tower's tensors cannot be read", (RuntimeError,)):
        stored = read_tensors({n: t for n, t in tower.tensors.items() if not UNUSED.search(n)})
    prefix = next(p for p in tower.kind.PREFIXES if next(iter(stored)).startswith(p))
    weights = module.sanitized({tower.kind.own_name(name): w for name, w in stored.items()})
    packed = {name.removesuffix(".scales") for name in weights if name.endswith(".scales")}
    with one_line(f"{tower.place}: the vision tower's quantization is not supported"):
        nn.quantize(module, class_predicate=lambda at, m: at in packed and infer_quant_config(at, m, weights))
    expected = named(module)
    for name in sorted(expected.keys() ^ weights.keys()):
        state = "is missing" if name in expected else "is not part of the vision tower that config.json describes"
        raise ValueError(f"{tower.place}: tensor {prefix}{name} {state}")
    for name, w in weights.items():
        if w.shape != expected[name].shape:
            shapes = f"{w.shape}; config.json expects {expected[name].shape}"
            raise ValueError(f"{tower.place}: tensor {prefix}{name} has shape {shapes}")
    module.load_weights(list(weights.items()))
    return module


def _read(tower: TowerFiles, width: int, embed: Any) -> nn.Module:
    """Return the tower's module with its weights in memory; ValueError if they are damaged or do not fit into memory.

    embed: as in `open_vision`.
    """
    check_room(f"{tower.place}: vision tower:", tower.nbytes, ignore=False)
    module = lazy_tower(tower, width)
    with one_line(f"{tower.place}: the vision tower's tensors cannot be read", (RuntimeError,)):
        check_numbers(named(module), lambda name: (tower.place, name))
    module.embed = embed
    module.eval()
    return module


def _open_pixels(tower: TowerFiles, path: Path) -> Any:
    """Return the `Pixels` that prepares pictures for a tower; ValueError without Pillow, or for unusable settings."""
    with one_line(f"{tower.place}: {SETTINGS} is not usable", MISBUILT, keep=True):
        return tower.kind.Pixels(tower.settings, tower.config, path)


def _fingerprint(tower: TowerFiles) -> str:
    """Return a hexadecimal digest of the processor's settings, the tower's part of config.json, and the tensors.

    Of the tensors, names, shapes, types, and SAMPLED bytes from the beginning and from the middle count.
    """
    facts = [tower.settings, {name: tower.config.get(name) for name in OF_CONFIG}]
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=32)
    begins = {file: data_begins(file) for file in {tensor.file for tensor in tower.tensors.values()}}
    for name, tensor in sorted(tower.tensors.items()):
        digest.update(f"{name} {tensor.shape} {tensor.dtype}".encode())
        with tensor.file.open("rb") as f:
            for offset in (0, tensor.nbytes // 2):
                f.seek(begins[tensor.file][name] + offset)
                digest.update(f.read(min(SAMPLED, tensor.nbytes - offset)))
    return digest.hexdigest()
