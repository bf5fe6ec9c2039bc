"""Define `mlx-mtp models`: list the models on this machine."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from .terminal import printable

HEADINGS = ("NAME", "FAMILY", "SIZE", "FORMAT", "DRAFTS", "CONTEXT")


@click.command()
@click.argument("folders", nargs=-1, type=click.Path(file_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the facts as one JSON list.")
@click.option("--quiet", is_flag=True, help="No progress.")
def models(folders: tuple[Path, ...], as_json: bool, quiet: bool) -> None:
    """List the models on this machine.

    Each has a line, with the tokens of context that fit into memory. Where MTP heads are missing, or a model does not
    load, a second line has the command that adds them, or the reason. Models are looked for in the download cache of
    Hugging Face, in LM Studio's folder, in the cache of mlx-mtp and in FOLDERS. Except for those in FOLDERS, the last
    part of a name, in any case, can be given to --model unless several models have it.
    """
    from ..checkpoint.describe import describe
    from ..checkpoint.library import places
    from .progress import bar, shows_progress

    found, listed = places(folders), []
    with bar(shown=shows_progress(quiet=quiet or as_json)) as update:
        for i, place in enumerate(found):
            update(place.name, i, len(found))
            listed.append(describe(place))
    if as_json:
        return click.echo(json.dumps([asdict(each) for each in listed], indent=2))
    if not listed:
        return click.echo("No models found; `mlx-mtp pull NAME` downloads one, and the demo needs none.")
    rows = [HEADINGS, *map(_row, listed)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADINGS))]
    for row, each in zip(rows, [None, *listed], strict=True):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if each and each.advice:
            click.echo(f"    {printable(each.advice)}")


def _row(each: Any) -> tuple[str, ...]:
    from ..checkpoint.report import size

    formats = re.sub(r"( affine)? g\d+( \(\d+ modules\))?", "", each.stored or "").split(", ")
    stored = ", ".join(dict.fromkeys(formats))  # such as "4-bit, 8-bit": group sizes would make the table too wide
    fits = "" if each.context is None else f"{each.context:,}" if each.context else "none: too large"
    cells = each.name, each.family or "", size(each.size), stored, each.drafts, fits
    return tuple(map(printable, cells))
