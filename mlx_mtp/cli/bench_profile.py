"""Run `mlx-mtp bench profile`: where a cycle's time goes."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import Choice, FloatRange, IntRange, option

from .bench_options import console, cooldown_of, finish, run_options, subject_of, subject_options
from .bench_pictures import WRITTEN
from .from_flags import default_step
from .options import options

if TYPE_CHECKING:
    from ..bench.profile import Profile, Workload
    from ..bench.subject import Subject

CATEGORY = "code_python"
CAPTURED = ("prefill", "draft", "verify", "accept")  # that can be captured
what_options = options(
    option("--num-draft-tokens", type=IntRange(0), help="Drafts in every cycle; 0 is plain.  [default: all heads]"),
    option("--category", default=CATEGORY, help="The kind of prompt that is continued."),
    option("--context", type=IntRange(1), help="Pad the prompt to so many tokens."),
    option("--max-tokens", "-m", type=IntRange(2), help="Most tokens of the text.  [default: 128, --quick 48]"),
    option("--bandwidth", type=FloatRange(1e-3), help="The chip's, in GB/s.  [default: known, or measured]"),
)
capture_options = options(
    option("--capture", type=Choice(CAPTURED), help="Also a GPU trace of this phase."),
    option("--capture-cycles", type=IntRange(1, 16), default=1, help="Cycles to trace, a file each."),
    option("--capture-path", type=WRITTEN, default=Path("mlx-mtp.gputrace"), help="Where the trace goes."),
)


@click.command()
@subject_options
@what_options
@capture_options
@run_options
def profile(**flags: Any) -> None:
    """Time, operations and bytes of a cycle by phase: prefill, draft, verify, accept, and the host in between.

    The decoding loop overlaps phases, and MLX is lazy: here the device is waited for between phases, and the same
    text is decoded by the loop itself in turn, which says what that costs. Drafts are the heads', as many in every
    cycle. On a Mac, --capture writes GPU traces for Xcode.
    """
    from ..bench.capture import capture, check_capture
    from ..bench.profile import Workload
    from ..bench.profile import profile as measure
    from ..bench.prompts import make_prompts
    from ..generate import default_draft_tokens

    phase, path, cycles = flags["capture"], flags["capture_path"], flags["capture_cycles"]
    if phase:
        check_capture(phase, path, cycles)
    subject = subject_of(flags)
    model, what = subject.model, {"context": flags["context"] or 0, "only": (flags["category"],)}
    (prompt,) = make_prompts(subject.tokenizer, model.vocab_size, each=1, **what)
    k = default_draft_tokens(model) if flags["num_draft_tokens"] is None else flags["num_draft_tokens"]
    work = Workload(model, prompt.tokens, flags["max_tokens"] or (48 if flags["quick"] else 128), k, default_step())
    rounds = flags["rounds"] or (9 if flags["quick"] else 21)
    with subject.acceptance():
        found = measure(work, rounds=rounds, cooldown=cooldown_of(flags))
        _show(subject, work, found, flags)
        for file in capture(work, phase, path, cycles) if phase else ():
            click.echo(f"trace of {phase}: {file}", err=True)


def _show(subject: "Subject", work: "Workload", found: "Profile", flags: dict[str, Any]) -> None:
    from ..bench import result
    from ..bench.census import bytes_read, launches
    from ..bench.profile_report import bandwidth_of, lines, phase_table, raw, remarks

    operations, nbytes = launches(work), bytes_read(work)
    bandwidth, made, out = bandwidth_of(flags["bandwidth"]), lines(found, operations, nbytes), console()
    out.print(phase_table(made, bandwidth, f"{result.named(subject.facts)}, {work.k} drafts per cycle"))
    for remark in remarks(found, made, bandwidth):
        out.print(remark, highlight=False)
    names = ("category", "context", "quick")
    options = {"k": work.k, "max_tokens": work.max_tokens, **{name: flags[name] for name in names}}
    measured = {**raw(found, operations, nbytes), "bandwidth": vars(bandwidth)}
    finish(result.result("profile", subject.facts, options, **measured), flags)
