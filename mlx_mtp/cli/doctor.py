"""Define `mlx-mtp doctor`: check kernels, time them, and write a report to share."""

import json
from pathlib import Path
from typing import Any

import click
from click import FloatRange, IntRange, option

from .bench_options import loaded_from
from .next_command import after_doctor, loading_words
from .options import checkpoint_options, refuse, source_options


@click.command()
@checkpoint_options
@source_options
@option("--compile-only", is_flag=True, help="Only compile the kernels of released models.")
@option("--bits-only", is_flag=True, help="Only check the kernels' bits, on small shapes.")
@option("--op", multiple=True, help="With --compile-only or --bits-only: only this kernel; repeatable.")
@option("--sample", type=IntRange(1), help="With --compile-only: number of texts per kernel.  [default: all]")
@option("--all-formats", is_flag=True, help="With --compile-only: all formats of weights, not only released ones.")
@option("--limit", type=FloatRange(1), help="With --compile-only: maximum seconds per text.  [default: 60]")
@option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("mlx-mtp-doctor"),
    help="Name of the two output files, NAME.json and NAME.md.",
)
def doctor(**flags: Any) -> None:
    """Check the kernels and measure their gain on this machine.

    Nothing but a --model of the hub is downloaded. The command compares every kernel with MLX's own bits, on shapes
    of released models with random weights and on the model; it compares the model's rows of one pass with the same
    rows alone; it times 1 to 8 rows, plain and drafted decoding, and a cycle by phase. Without a Metal GPU the
    kernels run emulated on small shapes, without times; that needs clang (pip install -e '.[emulate]'), without which
    they are not checked. The two output files can be pasted into an issue. Exit code 1 if anything is wrong.

    --compile-only compiles each kernel in a child process, which is killed after --limit seconds: with MLX on a Metal
    GPU, elsewhere with clang's front end, which is not Apple's compiler. The JSON report is updated throughout, so it
    exists after Ctrl-C or a crash. Exit code 0 if each source text was compiled or needs a type that the device
    lacks; 1 if one was refused, hung or crashed, or nothing could be compiled; 130 after Ctrl-C.

    --bits-only checks the bits of every kernel on small shapes in every type that the GPU supports, without a model.

    `mlx-mtp verify-lossless` compares whole texts with and without drafts; `mlx-mtp bench decode` measures the speed
    on nine kinds of prompts.
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
    """Raise UsageError for flags that exclude each other, or that need another flag."""
    compiling, checking = flags["compile_only"], flags["bits_only"]
    if compiling and checking:
        raise click.UsageError("--compile-only and --bits-only: choose one")
    if not compiling:
        refuse(flags, ("sample", "all_formats", "limit"), "{} needs --compile-only")
    if flags["op"] and not (compiling or checking):
        raise click.UsageError("--op needs --compile-only or --bits-only")
    if (given := loading_words(flags)) and (compiling or checking):
        raise click.UsageError(f"{given[0]}: --compile-only and --bits-only check no model")


def check_ops(ops: tuple[str, ...], known: tuple[str, ...]) -> None:
    """Raise BadParameter for an unknown kernel."""
    for op in ops:
        if op not in known:
            raise click.BadParameter(f"{op!r}: allowed are {', '.join(known)}", param_hint="--op")


def compile_only(file: Path, flags: dict[str, Any]) -> None:
    """Compile the kernels' Metal texts, write the JSON report, print a line per kernel; exit 1 on a failure."""
    from ..bench import compile_check, compile_jobs
    from .progress import stages

    check_ops(flags["op"], compile_jobs.OPS)
    limit = flags["limit"] or compile_check.LIMIT
    compile_check.CompileCheck((), file, limit).write()  # listing the texts takes seconds
    launches = compile_jobs.launches(flags["op"], flags["sample"], flags["all_formats"])
    jobs = [compile_jobs.job_of(launch) for launch in launches]
    check = compile_check.CompileCheck(jobs, file, limit)
    try:
        with stages(quiet=False) as progress:
            check.run(progress)
    finally:
        click.echo("\n".join(compile_check.lines(check.found)))
        click.echo(f"written: {file}")
    if not compile_check.is_good(check.found):
        raise SystemExit(1)


def examine_kernels(out: Path, flags: dict[str, Any]) -> None:
    """Check the kernels and, without --bits-only, the model; write out.json and out.md; exit 1 if any is wrong."""
    from ..bench.doctor import OPS, examine, examine_bits
    from ..bench.doctor_page import matrix_unit, page, verdict
    from ..bench.subject import open_subject
    from ..machine.atomic import write_whole

    def progress(what: str) -> None:
        click.echo(f"... {what}", err=True)

    check_ops(flags["op"], OPS)
    if flags["bits_only"]:
        found = examine_bits(flags["op"], progress)
    else:
        found = examine(open_subject(kernels="off", **loaded_from(flags)), progress)
    good, words = verdict(found)
    write_whole(f"{out}.json", json.dumps(found, indent=1) + "\n")
    write_whole(f"{out}.md", page(found))
    click.echo(f"{words}\n{matrix_unit(found['matrix_unit'])}\nwritten: {out}.json, {out}.md")
    if not flags["bits_only"]:
        click.echo(after_doctor(good, flags))
    if not good:
        raise SystemExit(1)
