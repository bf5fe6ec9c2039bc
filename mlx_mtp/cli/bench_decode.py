"""Define the `mlx-mtp bench` commands that decode with a model: decode, compare, verify, profile, parallel."""

from functools import partial
from pathlib import Path
from typing import Any

import click
from click import Choice, FloatRange, IntRange, option

from . import bench_options as shared
from .image_options import WithImages, image_options
from .next_command import after_bench
from .options import BITS, GIVEN, refuse, typed

SHOWN = 20  # maximum number of differing texts to list
GRAMMAR = "FILE|builtin"
EXCLUDED = "drafts", "trees", "contexts", "categories", "prompts", "synth_rates"  # options that --grammar excludes
MOST_ROWS = 16  # maximum rows of a verify
CONTEXTS, LOOKED_BACK = (
    {False: (1024, 4096), True: (128, 1024)},
    "1024,4096, --quick 128,1024",
)  # contexts of a verify
INTEGERS = partial(shared.numbers, int)


@click.command(cls=WithImages)
@shared.subject_options
@option("--drafts", callback=INTEGERS, help="Fixed numbers of drafts, such as 1,2,3.  [default: 1..3]")
@option("--tree", "trees", callback=INTEGERS, help="Draft trees of these numbers of rows as well, such as 4,8,16.")
@option("--contexts", callback=INTEGERS, help="Pad the prompts to these numbers of tokens, such as 512,4096.")
@option("--categories", help="Only these kinds of prompts, separated by commas.")
@option("--prompts", "each", type=IntRange(1, 2), help="Number of prompts of each kind.  [default: 2, --quick 1]")
@option("--max-tokens", "-m", type=IntRange(2), help="Maximum tokens per text.  [default: 128, --quick 48]")
@option("--temp", type=FloatRange(0), default=0.0, help="Temperature; 0 is greedy.")
@option("--seed", type=IntRange(0, 2**31), default=0, help="Seed of the draws.")
@option("--kv-bits", type=BITS, help="Quantize the target's KV cache.")
@option("--mtp-kv-bits", type=BITS, help="Quantize the heads' KV caches.")
@option("--grammar", metavar=GRAMMAR, help="Decode under a JSON schema or .lark grammar; builtin: five schemas.")
@image_options
@shared.run_options
def decode(**flags: Any) -> None:
    """Compare tokens per second with and without drafts.

    The contenders are mlx-lm's loop, our plain loop, fixed numbers of drafts, trees, and adaptive drafting. They take
    turns on nine kinds of prompts. The prefill is timed separately. All texts must be equal, but mlx-lm's with
    --temp, and drafted ones with --synth-rates; a difference is reported, and in float32 the exit code is then 1
    unless the target's cache is quantized.

    With --image there is one prompt per picture instead, with a question about it; mlx-lm's loop cannot read these.

    With --grammar the contenders are our loops under the grammar: plain, with drafts of the heads, of the grammar,
    and of both; and our plain loop without the grammar, whose text may differ.

    `mlx-mtp verify-lossless` judges whether rounding explains a difference; `mlx-mtp doctor` checks and times each
    kernel; `mlx-mtp bench profile` and `mlx-mtp bench verify` show where the time goes.
    """
    from ..bench.decode import broken

    given = {**flags, "prompts": flags["each"]}
    if flags["grammar"]:
        refuse(given, EXCLUDED, "--grammar excludes {}; leave one of them out")
    if flags["images"]:
        names = "contexts", "categories", "prompts", "synth_rates", "grammar"
        refuse(given, names, "--image excludes {}; leave one of them out")
    flags["max_tokens"] = flags["max_tokens"] or (48 if flags["quick"] else 128)
    found = _measured(flags)
    _print(found, flags)
    shared.finish(found, flags)
    if broken(found):
        raise SystemExit(1)


def _measured(flags: dict[str, Any]) -> dict[str, Any]:
    """Measure at all contexts and return the result; --out is written after each of them."""
    from ..bench import result
    from ..bench.decode import LoopSettings, as_result, measure, open_guided_session, open_session
    from ..bench.grammars import guided_prompts
    from ..bench.subject import make_prompts, picture_prompts
    from ..cache.kinds import group_size_for
    from ..decoding.options import default_chunk

    subject, quick = shared.subject_of(flags), flags["quick"]
    rounds = flags["rounds"] or (3 if quick else 5)
    guided, cooldown = flags["grammar"], shared.cooldown_of(flags)
    if guided:
        session = open_guided_session(subject, rounds, cooldown)
    else:
        session = open_session(subject, flags["drafts"], rounds, cooldown, flags["trees"])
    only = flags["categories"].split(",") if flags["categories"] else ()
    of_all = {"each": flags["each"] or (1 if quick else 2), "only": only}
    if guided:
        made = [guided_prompts(subject, guided)]
    elif flags["images"]:
        made = [picture_prompts(subject, flags["images"], flags["resize_shape"])]
    else:
        tokenizer, size = subject.tokenizer, subject.model.vocab_size
        made = [make_prompts(tokenizer, size, context=c, **of_all) for c in flags["contexts"] or (0,)]
    options = {"contenders": [loop.name for loop in session.loops], "max_tokens": flags["max_tokens"]}
    options |= {name: flags[name] for name in ("categories", "each", "temp", "seed", "quick", "grammar")}
    options["images"] = len(flags["images"])
    given = {
        "stop_tokens": subject.stop_tokens,
        "prefill_step_size": default_chunk(subject.model),
        **{name: flags[name] for name in ("max_tokens", "temp", "seed")},
        **{name: flags[name] and int(flags[name]) for name in ("kv_bits", "mtp_kv_bits")},
    }
    settings = LoopSettings(kv_group_size=group_size_for(subject.model), **given)
    for prompts in made:
        with shared.bar() as progress:
            measure(session, prompts, settings, progress)
        if flags["out"]:
            result.write(as_result(session, options), flags["out"])  # keeps it if the next context is interrupted
    return as_result(session, options)


def _print(found: dict[str, Any], flags: dict[str, Any]) -> None:
    from ..bench.page import tables_of

    out = shared.console(as_json=flags["as_json"])
    out.print("Ratios compare tok/s within a round; brackets show their spread, which is inconclusive above 5%.\n")
    out.print(*tables_of(found))
    for name, why in found["left_out"].items():
        out.print(f"left out: {name} ({why})")
    for d in found["differences"][:SHOWN]:
        expected, other = (str(t[0]) if t else "the end" for t in (d["expected"], d["found"]))
        place = d["category"] + (f", {d['context']} tokens of context" if d["context"] else "")
        what = f"token {d['position']} is {other}, plain's is {expected}"
        out.print(f"text differs: {d['contender']} on {place}, {what}")
    if len(found["differences"]) > SHOWN:
        out.print(f"and {len(found['differences']) - SHOWN} more texts")
    if line := after_bench(bool(found["differences"]), flags):
        out.print(line, markup=False, highlight=False, soft_wrap=True)


@click.command()
@click.argument("before", type=GIVEN)
@click.argument("after", type=GIVEN)
def compare(before: Path, after: Path) -> None:
    """Show the changes between two results of `bench decode`."""
    from ..bench import result
    from ..bench.decode_tables import compared, unlike

    results = result.read(before, "decode"), result.read(after, "decode")
    with shared.complete((before, after)):
        lines, table = unlike(*results), compared(*results)
    out = shared.console(as_json=False)
    for line in lines:
        out.print(f"not alike: {line}", highlight=False)
    out.print(
        table if table.row_count else "nothing to compare: no loop has the same context and caches in both results"
    )


@click.command()
@shared.subject_options
@option("--rows", callback=INTEGERS, help="Numbers of rows, such as 1,2,4; 1 to 16.  [default: all]")
@option("--contexts", callback=INTEGERS, help=f"Numbers of cached positions.  [default: {LOOKED_BACK}]")
@shared.run_options
def verify(**flags: Any) -> None:
    """Measure the cost of a verify of M rows relative to one row.

    T(M)/T(1) is measured for the whole model, with the decoding loop's own pass, and for each part: projections,
    attention at each context, experts, recurrent layers, LM head. A part is a chain of calls on the model's layers,
    each of which depends on the previous one. No part contains norms, RoPE, sums, embeddings, sparse attention, or
    latent attention's products per head. Stock is mlx-lm's modules; ours uses the Metal kernels that are on. Timed
    runs are short, so there is no rest before them without --cooldown.
    """
    from ..bench import result
    from ..bench.verify import CurvePlan, Kernels, measure, remarks, text_of
    from ..decoding.options import default_chunk

    rows = tuple(sorted({1, *(flags["rows"] or range(1, MOST_ROWS + 1))}))
    rounds = flags["rounds"] or (5 if flags["quick"] else 11)
    plan = CurvePlan(rows, flags["contexts"] or CONTEXTS[flags["quick"]], rounds, flags["cooldown"] or 0.0)
    subject = shared.subject_of({**flags, "kernels": "off"})
    kernels = Kernels(subject.model, flags["kernels"], rows[-1])
    text, curves = text_of(subject, max(plan.contexts)), []
    with shared.bar() as progress:
        progress("caches", 0, 0)
        for curve in measure(subject.model, text, kernels, plan, default_chunk(subject.model)):
            curves.append(curve)
            progress(f"{result.curve_title(curve)} done", len(curves), 0)
    facts = {**subject.facts, "kernels": list(kernels.words)}
    options = {"rows": rows, "contexts": plan.contexts, "rounds": plan.rounds, "quick": flags["quick"]}
    found = result.result("verify", facts, options, curves=curves)
    shared.report(found, flags, remarks(kernels, subject.facts["target_bytes"]))


@click.command()
@shared.subject_options
@option(
    "--num-draft-tokens",
    type=IntRange(0),
    help="Drafts in every cycle; 0 decodes plainly.  [default: by the kind of drafter]",
)
@option("--category", default="code_python", help="Kind of the prompt.")
@option("--context", type=IntRange(1), help="Pad the prompt to this number of tokens.")
@option("--max-tokens", "-m", type=IntRange(2), help="Maximum tokens of the text.  [default: 128, --quick 48]")
@option("--bandwidth", type=FloatRange(1e-3), help="The chip's bandwidth in GB/s.  [default: known, or measured]")
@typed("--capture", Choice(["prefill", "draft", "verify", "accept"]), None, "Also write a GPU trace of this phase.")
@option("--capture-cycles", type=IntRange(1, 16), default=1, help="Number of cycles to trace, one file each.")
@option("--capture-path", type=shared.WRITTEN, default=Path("mlx-mtp.gputrace"), help="Name of the trace file.")
@shared.run_options
def profile(**flags: Any) -> None:
    """Measure time, operations and bytes of a cycle by phase.

    The phases are prefill, draft, verify, accept, and the host in between. The decoding loop overlaps phases and MLX
    is lazy, so this command waits for the device after each phase. It also decodes the same text with the loop
    itself, alternately, which shows the cost of waiting. Every cycle has the same number of drafts, from the heads.
    Bytes are those that a phase must read, as `bench model` counts them, with experts routed as published.
    On a Mac, --capture writes GPU traces for Xcode.
    """
    from ..bench import census, profile_report, result
    from ..bench.profile import Workload
    from ..bench.subject import make_prompts
    from ..decoding.options import default_chunk, default_draft_tokens

    trace = flags["capture"], flags["capture_path"], flags["capture_cycles"]
    if flags["capture"]:
        census.check_capture(*trace)
    subject = shared.subject_of(flags)
    model, what = subject.model, {"context": flags["context"] or 0, "only": (flags["category"],)}
    (prompt,) = make_prompts(subject.tokenizer, model.vocab_size, each=1, **what)
    k = default_draft_tokens(model) if flags["num_draft_tokens"] is None else flags["num_draft_tokens"]
    work = Workload(
        model, prompt.tokens, flags["max_tokens"] or (48 if flags["quick"] else 128), k, default_chunk(model)
    )
    rounds = flags["rounds"] or (9 if flags["quick"] else 21)
    with subject.acceptance():
        raw = profile_report.profiled(work, rounds, cooldown=shared.cooldown_of(flags), gbps=flags["bandwidth"])
        options = {"k": work.k, "max_tokens": work.max_tokens}
        options |= {name: flags[name] for name in ("category", "context", "quick")}
        shared.report(result.result("profile", subject.facts, options, **raw), flags, profile_report.remarks(raw))
        for file in census.capture(work, *trace) if flags["capture"] else ():
            click.echo(f"trace of {flags['capture']}: {file}", err=True)


@click.command()
@shared.subject_options
@option("--texts", callback=INTEGERS, help="Numbers of sequences in a batch.  [default: 1,2,4,8, --quick 1,4]")
@option(
    "--contexts",
    callback=INTEGERS,
    help="Pad the prompts to these numbers of tokens, 0 for no padding.  [default: 0,4096, --quick 0]",
)
@option("--replayed/--no-replayed", default=None, help="Also ours with replayed cycles.  [default: yes, --quick no]")
@option("--max-tokens", "-m", type=IntRange(2), help="Tokens per sequence.  [default: 250, --quick 48]")
@shared.run_options
def parallel(**flags: Any) -> None:
    """Measure several sequences decoded in one batch.

    The contenders are mlx-lm's batches, ours without and with drafts, and our loop on one sequence after the other.
    Ours build each cycle or replay recorded ones. All take turns on the same prompts, without stop tokens. Speeds are
    those of all sequences together and of one; gaps between the arrivals of a sequence's tokens are percentiles.
    Sequences that differ from those decoded alone are counted.
    """
    from ..bench import parallel as batches
    from ..bench import result
    from ..bench.subject import make_prompts
    from ..decoding.options import default_chunk

    quick = flags["quick"]
    numbers = flags["texts"] or ((1, 4) if quick else batches.TEXTS)
    if wrong := [n for n in numbers if n < 1]:
        raise click.BadParameter(f"{wrong[0]}: expected at least 1", param_hint="--texts")
    length, rounds = flags["max_tokens"] or (48 if quick else 250), flags["rounds"] or (1 if quick else 3)
    subject = shared.subject_of(flags)
    step = default_chunk(subject.model)
    contexts = flags["contexts"] or batches.CONTEXTS[: 1 if quick else None]
    replayed = not quick if flags["replayed"] is None else flags["replayed"]
    each, running = 3 if subject.tokenizer else max(numbers), batches.contenders(subject, step, replayed=replayed)
    entries: list[dict[str, Any]] = []
    turns = {"rounds": rounds, "cooldown": shared.cooldown_of(flags)}
    for context in contexts:
        prompts = make_prompts(subject.tokenizer, subject.model.vocab_size, each=each, context=context)
        for n in numbers:
            with subject.acceptance():
                entries += batches.measure(running[0], prompts, n, length, drawn=bool(subject.rates), **turns)
    options = {"texts": numbers, "contexts": contexts, "max_tokens": length, "rounds": rounds, "quick": quick}
    found = result.result("parallel", subject.facts, options, entries=entries)
    shared.report(found, flags, [f"left out: mlx-lm ({running[1]})"] if running[1] else [])
