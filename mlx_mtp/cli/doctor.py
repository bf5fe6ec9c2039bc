"""Define `mlx-mtp doctor`: check kernels, time what they gain, and write it all down to be shared."""

import json
from pathlib import Path

import click
from click import option


@click.command()
@option("--model", help="Local directory, Hugging Face repository, or demo.  [default: demo]")
@option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("mlx-mtp-doctor"),
    help="Where the results go: this name with .json, and with .md a page.",
)
def doctor(model: str | None, out: Path) -> None:
    """Are the kernels right on this machine, and what do they and drafts gain? Nothing is downloaded for it.

    Checks every kernel beside MLX's own bits, in the shapes of released models with random weights, and of the model;
    times 1 to 8 rows, plain and drafted decoding, and a cycle by phase. Without a Metal GPU the kernels run emulated,
    on small shapes, and are not timed; that needs a clang (pip install -e '.[emulate]'), without which they are not
    checked. Two files can be pasted into an issue. Exit code 1 where anything is wrong.
    """
    from ..bench.doctor import examine
    from ..bench.doctor_page import page, verdict
    from ..bench.subject import open_subject
    from ..machine.atomic import write_whole

    out = out.with_suffix("") if out.suffix in (".json", ".md") else out
    if not out.parent.is_dir():
        raise click.BadParameter(f"{out}: no directory {out.parent}", param_hint="--out")
    found = examine(open_subject(model, kernels="off"), lambda what: click.echo(f"... {what}", err=True))
    good, words = verdict(found)
    write_whole(f"{out}.json", json.dumps(found, indent=1) + "\n")
    write_whole(f"{out}.md", page(found))
    click.echo(f"{words}\nwritten: {out}.json, {out}.md")
    if not good:
        raise SystemExit(1)
