"""Define `mlx-mtp inspect`: list the contents of a checkpoint from its headers."""

import gc
import json
from dataclasses import asdict

import click

from .terminal import printable


@click.command("inspect")
@click.argument("path", default="demo")
@click.option("--revision", help="Branch, tag or commit of a Hugging Face repository.")
@click.option("--ranks", type=click.IntRange(1), default=1, help="Number of machines that share the model.")
@click.option("--json", "as_json", is_flag=True, help="Print the facts as one JSON object.")
def inspect(path: str, revision: str | None, ranks: int, as_json: bool) -> None:
    """List a checkpoint's contents and whether it loads.

    PATH is a directory, a GGUF file, a Hugging Face repository or a short name; by default it is the demo. Only
    headers and the values of norms are read; no weights are downloaded. With --ranks, memory is that of each of this
    number of machines. Exit code 1 if it does not load.
    """
    from ..checkpoint.files import SMOLLM2, SMOLLM2_REPO, downloaded, headers_only, local
    from ..checkpoint.gguf.cached import is_gguf
    from ..checkpoint.inspect import as_text, inspect_checkpoint
    from .progress import shows_progress, watched

    directory = None if is_gguf(path) else local(path) or downloaded(path, revision)
    if directory is None and path == SMOLLM2:
        path = SMOLLM2_REPO
        directory = downloaded(path, revision)
    if is_gguf(directory or path):
        return _inspect_gguf(str(directory or path), ranks, as_json=as_json)
    gc.disable()  # collecting among 100,000 live tensor entries is slow
    try:
        if directory is None:
            with watched(shown=shows_progress(quiet=False)), headers_only(path, revision) as directory:
                facts = inspect_checkpoint(directory, values=False, ranks=ranks).at(path)
        else:
            facts = inspect_checkpoint(directory, ranks=ranks)
    finally:
        gc.enable()
    click.echo(json.dumps(asdict(facts), indent=2) if as_json else printable(as_text(facts)))
    if facts.problems:
        raise click.ClickException(facts.problems[0])


def _inspect_gguf(path: str, ranks: int, *, as_json: bool) -> None:
    """Print the contents of a GGUF file, and those of its transcoded checkpoint."""
    from ..checkpoint.gguf.inspect import inspect_gguf
    from ..checkpoint.gguf.report import as_facts
    from ..checkpoint.gguf.report import as_text as written
    from ..checkpoint.inspect import as_text

    prepared, facts = inspect_gguf(path, ranks=ranks)
    text = f"{written(prepared)}\n{as_text(facts)}"
    found = {**asdict(facts), "gguf": as_facts(prepared)}
    click.echo(json.dumps(found, indent=2) if as_json else printable(text))
    if facts.problems:
        raise click.ClickException(facts.problems[0])
