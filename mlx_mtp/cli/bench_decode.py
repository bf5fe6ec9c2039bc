"""Run `mlx-mtp bench decode` and `bench compare`: mlx-lm's loop, ours, and drafting, on the same prompts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click import Choice, FloatRange, IntRange, option

from . import bench_options as shared
from .from_flags import default_step
from .options import BITS, GIVEN

SHOWN = 20  # differences of texts that are listed
DOCUMENTS = ("stepwise_math",)  # asked behind a context of source code
INTEGERS = shared.numbers(int, "numbers")


@click.command()
@shared.subject_options
@option("--drafts", callback=INTEGERS, help="Fixed numbers of drafts, as 1,2,3.  [default: 1..3]")
@option("--contexts", callback=INTEGERS, help="Pad the prompts to so many tokens, as 512,4096.")
@option("--categories", help="Only these kinds of prompts, with commas between them.")
@option("--prompts", "each", type=IntRange(1, 2), help="Prompts of a kind.  [default: 2, --quick 1]")
@option("--max-tokens", "-m", type=IntRange(2), help="Most tokens per text.  [default: 128, --quick 48]")
@option("--temp", type=FloatRange(0), default=0.0, help="Temperature; 0 is greedy.")
@option("--seed", type=IntRange(0, 2**31), default=0, help="Seed of the draws.")
@option("--kv-bits", type=BITS, help="Quantize the target's KV cache.")
@option("--mtp-kv-bits", type=BITS, help="Quantize the heads' KV caches.")
@option("--preset", type=Choice(["documents"]), help="The published experiment, beside its figures.")
@shared.run_options
@option("--compare", type=GIVEN, help="Show what changed since this earlier result.")
def decode(**flags: Any) -> None:
    """Tokens per second of mlx-lm's loop, our plain one, fixed numbers of drafts, and adaptive drafting.

    All take turns on nine kinds of prompts. Reading a prompt is timed apart. Texts must be equal: where they are not
    it is said, and in float32 the exit code is 1.
    """
    from ..bench import result
    from ..bench.decode import broken

    if flags["preset"]:
        _check_preset(flags)
    before = result.read(flags["compare"], "decode") if flags["compare"] else None
    flags["max_tokens"] = flags["max_tokens"] or (48 if flags["quick"] else 128)
    found = _measured(flags)
    _print(found, flags)
    try:
        if before:
            _print_changes((flags["compare"],), before, found)
    finally:
        shared.finish(found, flags)
    if broken(found):
        raise SystemExit(1)


def _check_preset(flags: dict[str, Any]) -> None:
    """Refuse the published experiment with other conditions, or without its model."""
    if not (flags["model"] or flags["config"] or flags["quick"]):
        raise click.UsageError("--preset documents: needs --model or --config with three chained heads, or --quick")
    if given := [name for name in ("contexts", "kv_bits", "mtp_kv_bits") if flags[name]]:
        raise click.UsageError(f"--preset documents: not with --{given[0].replace('_', '-')}, which it sets itself")


def _measured(flags: dict[str, Any]) -> dict[str, Any]:
    """Measure everything that was asked for, as a result."""
    from ..bench import result
    from ..bench.decode import as_result, measure, open_session
    from ..bench.loops import LoopSettings
    from ..bench.prompts import make_prompts
    from ..cache.prompt_cache import group_size_for

    subject, quick = shared.subject_of(flags), flags["quick"]
    rounds = flags["rounds"] or (3 if quick else 5)
    session = open_session(subject, flags["drafts"], rounds, shared.cooldown_of(flags))
    conditions = _conditions(subject.model, flags)
    only = flags["categories"].split(",") if flags["categories"] else DOCUMENTS if flags["preset"] else ()
    of_all = {"each": flags["each"] or (1 if quick or flags["preset"] else 2), "only": only}
    made = [make_prompts(subject.tokenizer, subject.model.vocab_size, context=c, **of_all) for c, *_ in conditions]
    options = {"contenders": [loop.name for loop in session.loops], "max_tokens": flags["max_tokens"]}
    options |= {name: flags[name] for name in ("categories", "each", "temp", "seed", "preset", "quick")}
    settings = LoopSettings(
        **{name: flags[name] for name in ("max_tokens", "temp", "seed")},
        stop_tokens=subject.stop_tokens,
        prefill_step_size=default_step(),
        kv_group_size=group_size_for(subject.model),
    )
    for prompts, (_, kv_bits, mtp_kv_bits) in zip(made, conditions, strict=True):
        with shared.bar() as progress:
            measure(session, prompts, replace(settings, kv_bits=kv_bits, mtp_kv_bits=mtp_kv_bits), progress)
        if flags["out"]:
            result.write(as_result(session, options), flags["out"])  # what there is, if the next one is interrupted
    return as_result(session, options)


def _conditions(model: Any, flags: dict[str, Any]) -> list[tuple[int, int | None, int | None]]:
    """List (tokens of context, bits of the target's cache, bits of the heads')."""
    if flags["preset"]:
        from ..bench import documents

        documents.check(model)
        published, quick = documents.conditions(), flags["quick"]
        return [(documents.tokens(c, quick=quick), kv_bits, mtp_kv_bits) for c, kv_bits, mtp_kv_bits in published]
    kv_bits, mtp_kv_bits = (flags[name] and int(flags[name]) for name in ("kv_bits", "mtp_kv_bits"))
    return [(context, kv_bits, mtp_kv_bits) for context in flags["contexts"] or (0,)]


def _print(found: dict[str, Any], flags: dict[str, Any]) -> None:
    from ..bench import documents
    from ..bench.page import tables_of

    out = shared.console()
    out.print("Ratios are of tok/s, within a round; in brackets their spread, which above 5% is inconclusive.\n")
    out.print(*tables_of(found))
    for name, why in found["left_out"].items():
        out.print(f"left out: {name} ({why})")
    for d in found["differences"][:SHOWN]:
        expected, other = (str(t[0]) if t else "the end" for t in (d["expected"], d["found"]))
        place = f"{d['category']}, {d['context']} tokens of context" if d["context"] else d["category"]
        what = f"token {d['position']} is {other}, plain's is {expected}"
        out.print(f"text differs: {d['contender']} on {place}, {what}")
    if len(found["differences"]) > SHOWN:
        out.print(f"and {len(found['differences']) - SHOWN} texts more")
    if flags["preset"]:
        out.print(documents.beside(found, quick=flags["quick"]))


def _print_changes(files: tuple[Path, ...], before: dict[str, Any], found: dict[str, Any]) -> None:
    """Print what changed between two results, of which these were read from files."""
    from ..bench.decode_tables import compared, unlike

    with shared.complete(files):
        lines, table = unlike(before, found), compared(before, found)
    out = shared.console()
    for line in lines:
        out.print(f"not alike: {line}", highlight=False)
    out.print(table if table.row_count else "nothing to compare: no loop has the same context and caches in both")


@click.command()
@click.argument("before", type=GIVEN)
@click.argument("after", type=GIVEN)
def compare(before: Path, after: Path) -> None:
    """What changed from one result of `bench decode` to another."""
    from ..bench import result

    _print_changes((before, after), result.read(before, "decode"), result.read(after, "decode"))
