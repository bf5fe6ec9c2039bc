"""Run `mlx-mtp bench parallel`: several texts at once."""

from typing import Any

import click
from click import IntRange, option

from . import bench_options as shared

INTEGERS = shared.numbers(int, "numbers")


@click.command()
@shared.subject_options
@option("--texts", callback=INTEGERS, help="Numbers of texts at once.  [default: 1,2,4,8, --quick 1,4]")
@option(
    "--contexts",
    callback=INTEGERS,
    help="Pad the prompts to so many tokens, 0 for as they are.  [default: 0,4096, --quick 0]",
)
@option("--replayed/--no-replayed", default=None, help="Ours with replayed cycles, too.  [default: yes, --quick no]")
@option("--max-tokens", "-m", type=IntRange(2), help="Tokens per text.  [default: 250, --quick 48]")
@shared.run_options
def parallel(**flags: Any) -> None:
    """Texts at once: mlx-lm's batches, ours without and with drafts, and our own loop text after text.

    Ours build each cycle anew, or replay recorded ones. All take turns on the same prompts, without stops. Speeds
    are of all texts together and of one, gaps between a text's arrivals are percentiles. A text that differs from
    the one alone is counted.
    """
    from ..bench import result
    from ..bench.parallel import CONTEXTS, TEXTS, contenders, measure
    from ..bench.subject import make_prompts
    from ..decoding.options import default_step

    quick = flags["quick"]
    numbers = flags["texts"] or ((1, 4) if quick else TEXTS)
    if wrong := [n for n in numbers if n < 1]:
        raise click.BadParameter(f"{wrong[0]}: allowed is 1 or more", param_hint="--texts")
    most, rounds = flags["max_tokens"] or (48 if quick else 250), flags["rounds"] or (1 if quick else 3)
    subject, step = shared.subject_of(flags), default_step()
    contexts = flags["contexts"] or CONTEXTS[: 1 if quick else None]
    replayed = not quick if flags["replayed"] is None else flags["replayed"]
    each, running = 3 if subject.tokenizer else max(numbers), contenders(subject, step, replayed=replayed)
    entries: list[dict[str, Any]] = []
    turns = {"rounds": rounds, "cooldown": shared.cooldown_of(flags)}
    for context in contexts:
        prompts = make_prompts(subject.tokenizer, subject.model.vocab_size, each=each, context=context)
        for n in numbers:
            with subject.acceptance():
                entries += measure(running[0], prompts, n, most, drawn=bool(subject.rates), **turns)
    options = {"texts": numbers, "contexts": contexts, "max_tokens": most, "rounds": rounds, "quick": quick}
    found = result.result("parallel", subject.facts, options, entries=entries)
    shared.report(found, flags, [f"left out: mlx-lm ({running[1]})"] if running[1] else [])
