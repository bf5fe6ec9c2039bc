"""Run `mlx-mtp bench model`: what memory allows, what is predicted, and what was measured."""

from contextlib import nullcontext
from typing import Any

import click
from click import IntRange, option

from .bench_options import console, finish
from .bench_pictures import WRITTEN, complete, picture_options
from .options import GIVEN

QUICK_ROWS = (2, 4)
CONTEXT = 4096


@click.command("model")
@option("--chip", help='Such as "M3 Ultra".  [default: the one at hand, or of --measured]')
@option("--model", help="A released model by name, a checkpoint's directory, or demo.  [default: Step-3.5-Flash]")
@option("--config", type=GIVEN, help="A model's config.json, taken in 4 bits if it says nothing else.")
@option("--context", type=IntRange(1), help="Tokens before the rows.  [default: 4096, or of --measured]")
@option("--measured", type=GIVEN, multiple=True, help="A result of bench decode, verify or profile.")
@option("--quick", is_flag=True, help="Only a verify of 2 and of 4 rows.")
@option("--out", type=WRITTEN, help="Write the result there, too.")
@picture_options
def model(**flags: Any) -> None:
    """Set a model's byte floor beside what a chip is predicted, and was measured, to need. Nothing runs.

    The floor of a phase is what it has to read: shared weights, each expert that its rows visit once, LM head, KV
    caches. Predictions are a cost model's, with two constants per chip, fitted to published times of M <= 2 rows.
    """
    from ..bench import result
    from ..bench.roofline import assemble, chips
    from ..bench.roofline.tables import summary, tables

    results = [result.read(file) for file in flags["measured"]]
    with complete(flags["measured"]) if results else nullcontext():
        name = flags["chip"]
        if name is None:
            name = chips.find(results[0]["environment"]["chip"]) if results else chips.at_hand()
        chip = assemble.find_chip(name)
        subject = assemble.find_model(_model_of(flags, results), flags["config"], on_chip=chip is not None)
        rows = QUICK_ROWS if flags["quick"] else assemble.ROWS
        context = flags["context"] or (assemble.contexts(results[0])[0] if results else CONTEXT)
        found = assemble.bench_model(subject, chip, context, rows, results)
    out = console()
    out.print(*tables(found))
    notes = ["no chip that is known: bytes only; name one with --chip"] if chip is None else []
    out.print(*notes, *summary(found), sep="\n", highlight=False)
    finish(found, flags)


def _model_of(flags: dict[str, Any], results: list[dict[str, Any]]) -> str | None:
    from ..bench.roofline import assemble

    if flags["model"] or flags["config"] or not results:
        return flags["model"]
    known = assemble.measured_model(results[0])
    if known is None:
        name = results[0]["model"]["name"]
        raise click.UsageError(f"--measured: which model is {name!r}? name it with --model, or its --config")
    return known
