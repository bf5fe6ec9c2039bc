"""Run `mlx-mtp bench kernels`: our kernels, an op at a time, in time or in traffic."""

from typing import Any

import click

from .bench_options import console, finish, run_options

MOST_ROWS, QUICK_ROWS = 8, 4
# Which tables of `mlx-mtp emulate` set an op beside MLX's own kernels.
BESIDE = {
    **dict.fromkeys(("verify_qmm", "verify_glu", "verify_qmm_mma", "verify_gemv"), "products"),
    **{"verify_attention": "attention", "verify_moe": "experts", "verify_head": "head"},
}


@click.command()
@click.option("--op", help="Only this kernel, such as verify_qmm.")
@click.option("--rows", type=click.IntRange(1, MOST_ROWS), help="Most rows M.  [default: 8, --quick 4]")
@click.option("--emulate", is_flag=True, help="Count memory traffic on the CPU instead, without a GPU.")
@run_options
def kernels(**flags: Any) -> None:
    """Our kernels beside stock MLX, each on a released model's shapes: are they right, and how much faster?

    Times need a Metal GPU. With --emulate each kernel runs on small shapes on the CPU, and what it asks of memory is
    counted: no times. With --op, MLX's own kernel is set beside where the emulator has it. Turns are short:
    without --cooldown there is no rest before them.
    """
    from ..bench import result
    from ..bench.kernels import OPS, speed_table, timed, traffic, traffic_table
    from ..kernels import on_metal
    from .emulate import table_of

    if flags["op"] not in (None, *OPS):
        raise click.BadParameter(f"{flags['op']!r}: allowed are {', '.join(OPS)}", param_hint="--op")
    if not flags["emulate"] and not on_metal():
        raise click.UsageError("times need a Metal GPU, and there is none here; --emulate counts memory traffic")
    rows = flags["rows"] or (QUICK_ROWS if flags["quick"] else MOST_ROWS)
    out = console()
    if flags["emulate"]:
        found: list[Any] = list(traffic(flags["op"], rows))
        out.print(traffic_table(found))
        if flags["op"] in BESIDE:
            out.print(table_of(BESIDE[flags["op"]]))
    else:
        rounds = flags["rounds"] or (3 if flags["quick"] else 7)
        found = list(timed(flags["op"], rows, rounds, flags["cooldown"] or 0.0))
        out.print(speed_table(found))
        for each in (each for each in found if each.wrong):
            out.print(f"WRONG: {each.name}, M={each.rows}: {each.wrong}", style="bold red")
    options = {"op": flags["op"], "rows": rows, "emulate": flags["emulate"], "rounds": flags["rounds"]}
    finish(result.result("kernels", {"name": "kernels"}, options, found=[vars(each) for each in found]), flags)
