"""Inspect a GGUF file by its header: family, types, heads, and the memory that its transcoding needs."""

import tempfile
from pathlib import Path

from ..inspect import Inspection, inspect_checkpoint
from .convert import Prepared, prepare, write_holes


def inspect_gguf(file: str | Path, *, ranks: int = 1) -> tuple[Prepared, Inspection]:
    """Return (the plan of a GGUF file's transcoding, the inspection of its result); no transcoding is written.

    Errors of weights are not measured. ranks: number of ranks that share the target. ValueError for a file that
    cannot be transcoded.
    """
    prepared = prepare(file, measure=False)
    with tempfile.TemporaryDirectory(prefix="mlx-mtp-") as name:
        write_holes(Path(name), prepared.files, prepared.config)
        return prepared, inspect_checkpoint(Path(name), values=False, ranks=ranks).at(file)
