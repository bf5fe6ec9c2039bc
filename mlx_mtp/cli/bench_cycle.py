"""Run `mlx-mtp bench verify` and `profile`: what rows cost beside one row, and where a cycle's time goes."""

from pathlib import Path
from typing import Any

import click
from click import Choice, FloatRange, IntRange, option

from .bench_options import WRITTEN, bar, cooldown_of, numbers, report, run_options, subject_of, subject_options
from .from_flags import default_step

MOST_ROWS = 16
CONTEXTS = {False: (1024, 4096), True: (128, 1024)}  # --quick


@click.command()
@subject_options
@option("--rows", callback=numbers(int, "numbers"), help="Numbers of rows, as 1,2,4; 1 to 16.  [default: all]")
@option(
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
    title = f"T(M)/T(1), {result.named(subject.facts)}"
    what = {side: "stock modules" if side == STOCK else "our kernels" for side in kernels.sides}
    tables = [curve_table(curves, side, f"{title}, {name}") for side, name in what.items()]
    facts = {**subject.facts, "kernels": list(kernels.words)}
    options = {"rows": rows, "contexts": plan.contexts, "rounds": plan.rounds, "quick": flags["quick"]}
    found = result.result("verify", facts, options, curves=[vars(c) for c in curves])
    report(found, flags, remarks(kernels, subject.facts["target_bytes"]), *tables)


@click.command()
@subject_options
@option("--num-draft-tokens", type=IntRange(0), help="Drafts in every cycle; 0 is plain.  [default: all heads]")
@option("--category", default="code_python", help="The kind of prompt that is continued.")
@option("--context", type=IntRange(1), help="Pad the prompt to so many tokens.")
@option("--max-tokens", "-m", type=IntRange(2), help="Most tokens of the text.  [default: 128, --quick 48]")
@option("--bandwidth", type=FloatRange(1e-3), help="The chip's, in GB/s.  [default: known, or measured]")
@option("--capture", type=Choice(["prefill", "draft", "verify", "accept"]), help="Also a GPU trace of this phase.")
@option("--capture-cycles", type=IntRange(1, 16), default=1, help="Cycles to trace, a file each.")
@option("--capture-path", type=WRITTEN, default=Path("mlx-mtp.gputrace"), help="Where the trace goes.")
@run_options
def profile(**flags: Any) -> None:
    """Time, operations and bytes of a cycle by phase: prefill, draft, verify, accept, and the host in between.

    The decoding loop overlaps phases, and MLX is lazy: here the device is waited for between phases, and the same
    text is decoded by the loop itself in turn, which says what that costs. Drafts are the heads', as many in every
    cycle. On a Mac, --capture writes GPU traces for Xcode.
    """
    from ..bench import census, profile_report, result
    from ..bench.profile import Workload
    from ..bench.profile import profile as measure
    from ..bench.prompts import make_prompts
    from ..generate import default_draft_tokens

    trace = flags["capture"], flags["capture_path"], flags["capture_cycles"]
    if flags["capture"]:
        census.check_capture(*trace)
    subject = subject_of(flags)
    model, what = subject.model, {"context": flags["context"] or 0, "only": (flags["category"],)}
    (prompt,) = make_prompts(subject.tokenizer, model.vocab_size, each=1, **what)
    k = default_draft_tokens(model) if flags["num_draft_tokens"] is None else flags["num_draft_tokens"]
    work = Workload(model, prompt.tokens, flags["max_tokens"] or (48 if flags["quick"] else 128), k, default_step())
    rounds = flags["rounds"] or (9 if flags["quick"] else 21)
    with subject.acceptance():
        found = measure(work, rounds=rounds, cooldown=cooldown_of(flags))
        counts = census.launches(work), census.bytes_read(work)
        bandwidth = profile_report.bandwidth_of(flags["bandwidth"])
        options = {"k": work.k, "max_tokens": work.max_tokens}
        options |= {name: flags[name] for name in ("category", "context", "quick")}
        raw = {**profile_report.raw(found, *counts), "bandwidth": vars(bandwidth)}
        said = profile_report.remarks(found, profile_report.lines(found, *counts), bandwidth)
        report(result.result("profile", subject.facts, options, **raw), flags, said)
        for file in census.capture(work, *trace) if flags["capture"] else ():
            click.echo(f"trace of {flags['capture']}: {file}", err=True)
