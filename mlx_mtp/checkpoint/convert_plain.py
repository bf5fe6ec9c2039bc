"""Convert a checkpoint of a family without a port, as `mlx_lm.convert` does."""

import contextlib
import io
from pathlib import Path
from typing import Any

from mlx_lm import convert as mlx_lm_convert

from ..decoding.memory_needs import Budget
from ..machine import atomic
from ..machine.errors import one_line
from .files import read_config
from .load_plain import load_plain
from .report import Report
from .sort_tensors import Drafting


def check_no_heads(path: Path, **options: Any) -> None:
    """Raise ValueError if an option of the heads is not None. path: a checkpoint of a family without a port."""
    for name, value in options.items():
        if value is not None:
            family = read_config(path)["model_type"]
            raise ValueError(f"{name}={value}: leave it out; model_type {family!r} has no MTP heads here")


def convert_plain(path: Path, new: Path, **options: Any) -> tuple[int, Report]:
    """Write a conversion by mlx-lm to the new directory `new`; return its safetensors files' bytes, and its report.

    options: those of `mlx_lm.convert`, None for its default. A failed conversion leaves no files. ValueError, one
    line, if it cannot convert the checkpoint.
    """
    given = {name: value for name, value in options.items() if value is not None}
    with atomic.directory(new) as folder:
        written = folder / "converted"
        known = (ValueError, RuntimeError, KeyError, TypeError)
        with one_line(f"{path}: mlx-lm cannot convert it", known), contextlib.redirect_stdout(io.StringIO()):
            mlx_lm_convert(str(path), str(written), **given)
        for file in written.iterdir():
            file.rename(folder / file.name)
        written.rmdir()
        drafting = Drafting(False, None, {}, None)
        report = load_plain(folder, read_config(folder), drafting, Budget(ignore=True), lazy=True).runtime.report
    return sum(file.stat().st_size for file in new.glob("*.safetensors")), report
