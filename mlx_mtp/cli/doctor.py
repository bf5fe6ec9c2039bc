"""Define `mlx-mtp doctor`: check kernels, time what they gain, and write a report that can be shared."""

import json
from pathlib import Path
from typing import Any

import click
from click import FloatRange, IntRange, option


@click.command()
@option("--model", help="Local directory, Hugging Face repository, or demo.  [default: demo]")
@option("--compile-only", is_flag=True, help="Only compile every text of the kernels of released models.")
@option("--bits-only", is_flag=True, help="Only check the kernels' bits, on small shapes, without times.")
@option("--op", multiple=True, help="With --compile-only or --bits-only: only this kernel; may be repeated.")
@option("--sample", type=IntRange(1), help="With --compile-only: so many texts of each kernel.  [default: all]")
@option("--all-formats", is_flag=True, help="With --compile-only: every format of weights, not only released ones.")
@option("--limit", type=FloatRange(1), help="With --compile-only: seconds for one text.  [default: 60]")
@option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("mlx-mtp-doctor"),
    help="Where the results go: this name with .json, and with .md a page.",
)
def doctor(**flags: Any) -> None:
    """Are the kernels right on this machine, and what do they and drafts gain? Nothing is downloaded for it.

    Checks every kernel beside MLX's own bits, in the shapes of released models with random weights, and of the model;
    times 1 to 8 rows, plain and drafted decoding, and a cycle by phase. Without a Metal GPU the kernels run emulated,
    on small shapes, and are not timed; that needs a clang (pip install -e '.[emulate]'), without which they are not
    checked. Two files can be pasted into an issue. Exit code 1 where anything is wrong.

    --compile-only compiles each kernel in a process of its own, which is killed after --limit seconds: by MLX on a
    Metal GPU, elsewhere by clang's front end, which is not Apple's compiler. The JSON report is written from the
    start on, so that it is there after Ctrl-C or a crash, too. Exit code 0 where each text was compiled, or needs a
    type that the device lacks; 1 where one was refused, hung or crashed, or nothing could be compiled; 130 at Ctrl-C.
    """
    check_flags(flags)
    out = flags["out"].with_suffix("") if flags["out"].suffix in (".json", ".md") else flags["out"]
    if not out.parent.is_dir():
        raise click.BadParameter(f"{out}: no directory {out.parent}", param_hint="--out")
    if flags["compile_only"]:
        compile_only(Path(f"{out}.json"), flags)
    else:
        examine_kernels(out, flags)


def check_flags(flags: dict[str, Any]) -> None:
    """Raise UsageError for flags that do not belong together."""
    compiling, checking = flags["compile_only"], flags["bits_only"]
    if compiling and checking:
        raise click.UsageError("--compile-only and --bits-only: choose one")
    for name in ("sample", "all_formats", "limit"):
        if flags[name] and not compiling:
            raise click.UsageError(f"--{name.replace('_', '-')} needs --compile-only")
    if flags["op"] and not (compiling or checking):
        raise click.UsageError("--op needs --compile-only or --bits-only")
    if flags["model"] and (compiling or checking):
        raise click.UsageError("--model: --compile-only and --bits-only check no model")


def check_ops(ops: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Raise BadParameter for a kernel that is not known."""
    for op in ops:
        if op not in known:
            raise click.BadParameter(f"{op!r}: allowed are {', '.join(known)}", param_hint="--op")


def compile_only(file: Path, flags: dict[str, Any]) -> None:
    """Compile the kernels' texts, and show a line for each kernel."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

    from ..bench import compile_check, compile_jobs
    from .progress import stages

    check_ops(flags["op"], compile_jobs.OPS)
    limit = flags["limit"] or compile_check.LIMIT
    compile_check.CompileCheck((), file, limit).write()  # to list the texts takes seconds
    launches = compile_jobs.launches(flags["op"], flags["sample"], flags["all_formats"])
    jobs = [compile_jobs.job_of(launch) for launch in launches]
    check = compile_check.CompileCheck(jobs, file, limit)
    try:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        with stages(*columns, quiet=False) as tell:
            check.run(tell)
    finally:
        click.echo("\n".join(compile_check.lines(check.found)))
        click.echo(f"written: {file}")
    if not compile_check.is_good(check.found):
        raise SystemExit(1)


def examine_kernels(out: Path, flags: dict[str, Any]) -> None:
    """Check the kernels, and unless only their bits are asked for the model too; write both files."""
    from ..bench.doctor import OPS, examine, examine_bits
    from ..bench.doctor_page import page, verdict
    from ..bench.subject import open_subject
    from ..machine.atomic import write_whole

    def tell(what: str) -> None:
        click.echo(f"... {what}", err=True)

    check_ops(flags["op"], OPS)
    if flags["bits_only"]:
        found = examine_bits(flags["op"], tell)
    else:
        found = examine(open_subject(flags["model"], kernels="off"), tell)
    good, words = verdict(found)
    write_whole(f"{out}.json", json.dumps(found, indent=1) + "\n")
    write_whole(f"{out}.md", page(found))
    click.echo(f"{words}\nwritten: {out}.json, {out}.md")
    if not good:
        raise SystemExit(1)
