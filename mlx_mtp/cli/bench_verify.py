"""Run `mlx-mtp bench verify`: what the rows of a verify cost beside one row."""

from typing import Any

import click

from .bench_options import bar, console, finish, numbers, run_options, subject_of, subject_options
from .from_flags import default_step

MOST_ROWS = 16
CONTEXTS = {False: (1024, 4096), True: (128, 1024)}  # --quick


@click.command()
@subject_options
@click.option("--rows", callback=numbers(int, "numbers"), help="Numbers of rows, as 1,2,4; 1 to 16.  [default: all]")
@click.option(
    "--contexts",
    callback=numbers(int, "numbers"),
    help="Positions that the rows look back on.  [default: 1024,4096, --quick 128,1024]",
)
@run_options
def verify(**flags: Any) -> None:
    """T(M)/T(1): a verify of M rows beside one row, of the whole model and of each part.

    The whole is the decoding loop's own pass. Parts are chains of calls on the model's layers in turn, each of which
    waits for the one before: projections, attention at each context, experts, recurrent layers, LM head. Left out of
    the parts: norms, RoPE, sums, embeddings, latent attention's products per head, sparse attention. Stock is
    mlx-lm's modules; ours has the Metal kernels that are on. Turns are short: without --cooldown there is no rest.
    """
    from ..bench import result
    from ..bench.verify import STOCK, CurvePlan, Kernels, curve_table, measure, remarks, text_of

    rows = tuple(sorted({1, *(flags["rows"] or range(1, MOST_ROWS + 1))}))
    rounds = flags["rounds"] or (5 if flags["quick"] else 11)
    plan = CurvePlan(rows, flags["contexts"] or CONTEXTS[flags["quick"]], rounds, flags["cooldown"] or 0.0)
    subject = subject_of({**flags, "kernels": "off"})
    kernels = Kernels(subject.model, flags["kernels"])
    text, curves = text_of(subject, max(plan.contexts)), []
    with bar() as progress:
        progress("caches", 0, 0)
        for curve in measure(subject.model, text, kernels, plan, default_step()):
            curves.append(curve)
            progress(f"{curve.title} done", len(curves), 0)
    out = console()
    for side in kernels.sides:
        what = "stock modules" if side == STOCK else "our kernels"
        out.print(curve_table(curves, side, f"T(M)/T(1), {result.named(subject.facts)}, {what}"))
    for remark in remarks(kernels, subject.facts["target_bytes"]):
        out.print(remark, highlight=False)
    facts = {**subject.facts, "kernels": list(kernels.words)}
    options = {"rows": rows, "contexts": plan.contexts, "rounds": plan.rounds, "quick": flags["quick"]}
    finish(result.result("verify", facts, options, curves=[vars(c) for c in curves]), flags)
