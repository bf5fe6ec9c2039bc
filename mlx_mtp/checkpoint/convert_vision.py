"""Write a checkpoint's vision tower alone, for a conversion that lacks one."""

from pathlib import Path
from typing import Any, NamedTuple

from ..machine import atomic
from ..machine.errors import one_line
from ..models.vision import find_tower
from . import convert_writer as writer
from .convert_writer import Progress
from .files import CONVERTED, SMALL_FILES, read_config, read_tensors, resolve
from .parameters import check_numbers
from .vision import embedded, find_tower_files, lazy_tower
from .weight_files import read_stored
from .weight_names import VISION_FILE, read_index


class Extracted(NamedTuple):
    """The result of `extract_vision`: the file, the bytes of its tensors, and `TowerFiles.summary`."""

    path: Path
    nbytes: int
    summary: str


def extract_vision(
    hf_path: str | Path, vision_path: str | Path, *, revision: str | None = None, progress: Progress | None = None
) -> Extracted:
    """Write only a checkpoint's vision tower, to the new file `vision_path` or as VISION_FILE into that directory.

    `load` finds VISION_FILE in the directory of a conversion; give another place to it as `vision_path`. The tensors
    are unchanged; the file also has the tower's part of config.json and the image processor's settings. If there is a
    shard index, of the weight files only those with tensors of the tower are downloaded. revision, progress: as in
    `convert`. Raises a one-line ValueError for a path that is not allowed, a checkpoint without a usable tower, and a
    disk that is too full; OSError if the file cannot be written. A failure leaves no file.
    """
    new = writer.new_file("vision_path", vision_path, VISION_FILE)
    path = _fetched(hf_path, revision)
    config = read_config(path)
    tower = find_tower_files(path, config, read_stored(path, whole=False), None)
    if tower is None:
        raise ValueError(f"{path}: no vision tower in it")
    lazy_tower(tower, None)
    tensors, metadata = read_tensors(tower.tensors), CONVERTED | embedded(tower)
    atomic.check_free(new, writer.file_size(tensors))
    with atomic.file(new) as work, one_line(f"{path}: the vision tower cannot be read", (RuntimeError,)):
        total = writer.write(
            {work: tensors}, lambda name, w: check_numbers({name: w}, lambda name: (path, name)), progress, metadata
        )
    return Extracted(new, total, tower.summary)


def _fetched(hf_path: str | Path, revision: str | None) -> Path:
    """Return the directory of a checkpoint; one on the hub is downloaded, without weight files that lack the tower.

    All weight files are downloaded if no shard index lists a tensor of the tower.
    """
    path = resolve(hf_path, revision, files=SMALL_FILES)
    kind: Any = find_tower(read_config(path))
    names = sorted({file for name, file in read_index(path).items() if kind and name.startswith(kind.PREFIXES)})
    return resolve(hf_path, revision, files=(*SMALL_FILES, VISION_FILE, *names) if names else None)
