"""Options of every `mlx-mtp bench` command: what is measured, how often, and where the result goes."""

import contextlib
import json
import logging
import shlex
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from .bench_pictures import WRITTEN, draw, picture_options
from .options import GIVEN, options

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench.subject import Subject

WIDTH = 124  # columns that the tables need


def numbers(kind: type, what: str) -> Any:
    """Callback: numbers with commas between them, as a tuple; empty where the option is not given."""

    def parse(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple:
        try:
            return tuple(kind(part) for part in value.split(",")) if value is not None else ()
        except ValueError:
            raise click.BadParameter(f"{value!r}; expected {what} with commas between them") from None

    return parse


subject_options = options(
    click.option("--model", help="Local directory, Hugging Face repository, or demo.  [default: demo]"),
    click.option("--config", type=GIVEN, help="A config.json to draw a model of, with random weights."),
    click.option("--layers", type=click.IntRange(1), help="With --config, this many of its first layers."),
    click.option(
        "--q-bits",
        type=click.Choice(["2", "3", "4", "5", "6", "8", "16"]),
        help="With --config; 16 is not quantized.  [default: the file's, else 4]",
    ),
    click.option(
        "--q-group-size",
        type=click.Choice(["32", "64", "128"]),
        help="With --config.  [default: the file's, else 64]",
    ),
    click.option(
        "--synth-rates",
        callback=numbers(float, "chances"),
        help="Draw what is accepted: the share per depth that is kept, as 0.87,0.76,0.69; deeper ones fall on alike.",
    ),
    click.option("--mtp/--no-mtp", default=True, help="With the MTP heads."),
    click.option("--draft-model", help="Directory or Hugging Face repository of an EAGLE-3 head for the model."),
    click.option(
        "--kernels", type=click.Choice(["off", "exact", "fast"]), help="Metal kernels.  [default: by trial]"
    ),
)
run_options = options(
    click.option("--rounds", type=click.IntRange(1), help="Rounds in which all contenders take turns."),
    click.option(
        "--cooldown", type=click.FloatRange(0), help="Seconds of rest before each turn.  [default: 1 on a GPU]"
    ),
    click.option("--quick", is_flag=True, help="Fewer of everything: under two minutes for the demo."),
    click.option("--out", type=WRITTEN, help="Write the result there, too."),
    picture_options,
)


def subject_of(flags: dict[str, Any]) -> "Subject":
    """The model that the options name."""
    from .progress import loading, shows_progress

    with loading(shown=shows_progress(quiet=False)):
        from ..bench.subject import open_subject

        logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of long prompts, untruly
        return open_subject(
            flags["model"],
            flags["config"],
            layers=flags["layers"],
            bits=flags["q_bits"] and int(flags["q_bits"]),
            group_size=flags["q_group_size"] and int(flags["q_group_size"]),
            mtp=flags["mtp"],
            draft_model=flags["draft_model"],
            kernels=flags["kernels"],
            synth_rates=flags["synth_rates"],
        )


def cooldown_of(flags: dict[str, Any]) -> float:
    import mlx.core as mx

    on_gpu = mx.default_device() != mx.Device(mx.cpu)
    return flags["cooldown"] if flags["cooldown"] is not None else float(on_gpu)


@contextlib.contextmanager
def bar(*, shown: bool) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr; what it gives is told how much is done, of how much, and what comes next."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = BarColumn(bar_width=20), MofNCompleteColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total, what: progress.update(task, completed=done, total=total, description=what)


def console() -> "Console":
    """For tables: as wide as the terminal, but never narrower than they are."""
    from rich.console import Console

    return Console(width=max(WIDTH, Console().width if sys.stdout.isatty() else 0))


def finish(found: dict[str, Any], flags: dict[str, Any]) -> None:
    """Write the result and its pictures where they were asked for, and print it as the last line."""
    from ..bench import result

    line = json.dumps({**found, "command": shlex.join(["mlx-mtp", *sys.argv[1:]])})
    found = json.loads(line)  # as it is when it is read again
    try:
        if flags["out"]:
            result.write(found, flags["out"])
        draw([found], flags)
    finally:
        click.echo(line)
