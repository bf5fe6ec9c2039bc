"""Describe a GGUF file and its transcoding for users, as text and as JSON."""

from typing import Any

import mlx.core as mx

from ...kernels import BLOCK_FORMATS
from ..report import size, table
from .convert import Prepared
from .plan import FormatRow
from .tokenizer import described

RATE = 100e6  # bytes of a GGUF file that one core transcodes in a second; a low estimate


def as_text(prepared: Prepared) -> str:
    """Return lines of text about a GGUF file and its transcoding.

    They state size, heads, each type of matrices with its new format, the type in which MLX computes and, if they
    apply, the tokenizer and that mlx-lm does not read the result.
    """
    source, contents = prepared.source, prepared.source.contents
    files = f", {len(contents.files)} files" if len(contents.files) > 1 else ""
    count = len(source.model.mtp)
    return table(
        ("GGUF", f"{size(contents.nbytes)}, {len(source.entries):,} tensors{files}, {source.meta.architecture}"),
        ("heads", f"{count} MTP head{'s' * (count != 1)} in it" if count else "none in it"),
        *((" " if i else "types", _row(row, prepared)) for i, row in enumerate(prepared.rows)),
        ("computes", computes(prepared)),
        ("read by", read_by(prepared)),
        ("tokenizer", prepared.tokenizer is None and not prepared.copied and described(source.meta)),
    )


def computes(prepared: Prepared) -> str:
    """Return a phrase, such as "in float16": the type in which MLX multiplies.

    If affine scales have another type than activations, both types are named, too.
    """
    dtype = prepared.config["dtype"]
    kinds = {str(p.form.dtype).rpartition(".")[2] for p in prepared.parameters if p.form.mode == "affine"}
    mixed = kinds - {dtype}
    if not mixed:
        return f"in {dtype}"
    other, fits = ", ".join(sorted(mixed)), prepared.source.family.float16
    why = ", because this family's may not fit float16 (--dtype float16 tries it)"
    reason = why if dtype == "float32" and not fits else ""
    return f"in float32: scales are {other} and activations {dtype}{reason}"


def read_by(prepared: Prepared) -> str:
    """Return a note that mlx-lm does not read the block formats of a transcoding; "" if it has none."""
    modes = sorted({p.form.mode for p in prepared.parameters if p.form.mode in BLOCK_FORMATS})
    return f"mlx_mtp, not mlx-lm ({', '.join(modes)}); --gguf-plan affine writes MLX's formats" if modes else ""


def _row(row: FormatRow, prepared: Prepared) -> str:
    share = row.before / max(sum(r.before for r in prepared.rows), 1)
    error = ": exact" if prepared.measured else ""
    if row.loss is not None:
        error = f": error {row.loss.rms:.1e} of the weights, at most {row.loss.worst:.1e} of the largest"
    types = f"{row.kind} {share:.0%} ({size(row.before)}, {row.tensors} tensors) as {row.form}"
    return f"{types}, {size(row.after)}{error}"


def announcement(prepared: Prepared, place: Any) -> str:
    """Return a line with a transcoding's sizes, its destination `place` and an estimate of its duration.

    Without a Metal GPU a second line advises float32, if MLX would multiply in float16.
    """
    seconds = max(sum(row.before for row in prepared.rows) / RATE, 1)
    time = f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
    sizes = f"{size(prepared.source.contents.nbytes)} to {size(prepared.nbytes)}"
    slow = "\nFor use on a CPU give --gguf-exact: it multiplies float16 thirty times as slowly as float32."
    advice = slow if computes(prepared) == "in float16" and not mx.metal.is_available() else ""
    return f"Transcoding {sizes} in {place}, about {time}{advice}"


def as_facts(prepared: Prepared) -> dict[str, Any]:
    """Return the facts of the report as JSON values."""
    rows = [
        {
            "type": row.kind,
            "becomes": str(row.form),
            "tensors": row.tensors,
            "bytes": row.before,
            "bytes_after": row.after,
            "rms_error": row.loss and row.loss.rms,
            "worst_error": row.loss and row.loss.worst,
        }
        for row in prepared.rows
    ]
    source = prepared.source
    return {
        "architecture": source.meta.architecture,
        "files": [str(file) for file in source.contents.files],
        "bytes": source.contents.nbytes,
        "heads": len(source.model.mtp),
        "types": rows,
        "computes": computes(prepared),
    }
