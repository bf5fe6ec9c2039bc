"""Define the commands of `mlx-mtp bench` that load no model (kernels, model, plot), and the group itself."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from click import IntRange, option

from . import bench_options as shared
from .bench_decode import compare, decode, parallel, profile, verify
from .options import GIVEN, typed
from .together import check_command

MOST_ROWS, USUAL_ROWS, QUICK_ROWS = 32, 8, 4
CONTEXT = 4096


@click.group(invoke_without_command=True)
@click.pass_context
def bench(ctx: click.Context) -> None:
    """Measure a model on this machine.

    `mlx-mtp verify-lossless` checks that drafts do not change the text; `mlx-mtp doctor` checks each kernel.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        raise SystemExit(2)
    check_command(ctx.invoked_subcommand, ("decode",))


@click.command()
@option("--op", help="Only this kernel, such as verify_qmm.")
@option("--rows", type=IntRange(1, MOST_ROWS), help="Maximum number of rows M.  [default: 8, --quick 4]")
@option("--emulate", is_flag=True, help="Count memory traffic on the CPU; needs no GPU.")
@shared.run_options
def kernels(**flags: Any) -> None:
    """Compare our kernels with stock MLX: bits and speed.

    Each kernel runs on the shapes of released models. Times need a Metal GPU. With --emulate each kernel runs on
    small shapes on the CPU, which needs clang (pip install -e '.[emulate]'), and its memory traffic is counted
    instead; with --op the table also has MLX's own kernels for products, LM heads, experts and attention. Turns are
    short, so there is no rest before them without --cooldown.
    """
    from ..bench import result
    from ..bench.kernels import OPS, speed_table, stock_traffic, timed, traffic, traffic_table
    from ..kernels import on_metal

    op = flags["op"]
    if op not in (None, *OPS):
        raise click.BadParameter(f"{op!r}: allowed are {', '.join(OPS)}", param_hint="--op")
    if not flags["emulate"] and not on_metal():
        raise click.UsageError("times need a Metal GPU, and this machine has none; --emulate counts memory traffic")
    rows = flags["rows"] or (QUICK_ROWS if flags["quick"] else USUAL_ROWS)
    out = shared.console(as_json=flags["as_json"])
    if flags["emulate"]:
        found: list[Any] = [*traffic(op, rows), *stock_traffic(op, rows)]
        out.print(traffic_table(found))
    else:
        rounds = flags["rounds"] or (3 if flags["quick"] else 7)
        found = list(timed(op, rows, rounds, flags["cooldown"] or 0.0))
        out.print(speed_table(found))
        for each in (each for each in found if each["wrong"]):
            out.print("WRONG: {name}, M={rows}: {wrong}".format(**each), style="bold red")
    options = {"op": op, "rows": rows, "emulate": flags["emulate"], "rounds": flags["rounds"]}
    shared.finish(result.result("kernels", {"name": "kernels"}, options, found=found), flags)


@click.command("model")
@option("--chip", help='Such as "M3 Ultra".  [default: of this machine, or of --measured]')
@option("--model", help="A released model by name, a checkpoint's directory, or demo.  [default: Step-3.5-Flash]")
@option("--config", type=GIVEN, help="A model's config.json; 4 bits unless it states others.")
@option("--context", type=IntRange(1), help="Tokens before the rows.  [default: 4096, or that of --measured]")
@option("--measured", type=GIVEN, multiple=True, help="A result of bench decode, verify or profile; repeatable.")
@typed("--ranks", IntRange(1), 1, "Number of machines: also the traffic between them, over two links.")
@option("--quick", is_flag=True, help="Only verifies of 2 and 4 rows.")
@shared.result_options
def model(**flags: Any) -> None:
    """Predict a model's byte floor and times on a chip.

    No model runs. The floor of a phase is the bytes that it must read: shared weights, each expert that its rows
    visit once, LM head, KV caches, and recurrent states, which it also writes. A cost model with two constants per
    chip, fitted to published times of M <= 2 rows, predicts the times. --measured adds measured times.
    """
    from ..bench import result
    from ..bench.roofline import assemble, chips
    from ..bench.roofline.tables import summary

    results = [result.read(file) for file in flags["measured"]]
    with shared.complete(flags["measured"]) if results else nullcontext():
        name, of, context = flags["chip"], flags["model"], flags["context"] or CONTEXT
        if name is None:
            name = chips.find(results[0]["environment"]["chip"]) if results else chips.at_hand()
        chip = assemble.find_chip(name)
        if results and not of and not flags["config"]:
            of, name = assemble.measured_model(results[0]), results[0]["model"]["name"]
            if of is None:
                raise click.UsageError(
                    f"--measured: unknown model {name!r}; name it with --model, or give its --config"
                )
        subject = assemble.find_model(of, flags["config"], on_chip=chip is not None)
        if results and not flags["context"]:
            context = assemble.times(results[0])[0]["context"]
        rows = (2, 4) if flags["quick"] else assemble.ROWS
        found = assemble.bench_model(subject, chip, context, rows, results, flags["ranks"])
    notes = ["no chip that is known: bytes only; name one with --chip"] if chip is None else []
    shared.report(found, flags, [*notes, *summary(found)])


@click.command("plot")
@click.argument("files", nargs=-1, required=True, type=GIVEN)
@shared.picture_options
def plot(files: tuple[Path, ...], **flags: Any) -> None:
    """Draw results of other commands as a picture or a page.

    FILES are results that other commands wrote with --out; give --plot, --html or both. The pictures show costs and
    speeds, acceptance by kind of prompt, and phases.
    """
    from ..bench import result

    if not flags["plot"] and not flags["html"]:
        raise click.UsageError("nothing to write: --plot PICTURE, --html PAGE, or both")
    found = [result.read(file) for file in files]
    with shared.complete(files):
        shared.draw(found, flags)
    for file in filter(None, (flags["plot"], flags["html"])):
        click.echo(f"wrote {file}")


for command in (decode, parallel, compare, verify, kernels, profile, model, plot):
    bench.add_command(command)
