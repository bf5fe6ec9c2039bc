"""Define the options of the `mlx-mtp bench` commands: the model, the number of rounds, and the output files."""

import contextlib
import json
import logging
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import Choice, FloatRange, IntRange, option

from .options import GIVEN, KERNELS, checkpoint_options, checkpoint_path, options, source_options
from .terminal import terminal_size
from .together import follows, group

if TYPE_CHECKING:
    from rich.console import Console

    from ..bench.subject import Subject

WIDTH = 124  # minimum columns for the tables
WRITTEN = click.Path(dir_okay=False, path_type=Path)


def numbers(kind: type, _ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple:
    """Return an option's numbers of this kind, separated by commas; () if it is not given. Raises BadParameter."""
    try:
        return tuple(kind(part) for part in value.split(",")) if value is not None else ()
    except ValueError:
        what = "probabilities" if kind is float else "integers"
        raise click.BadParameter(f"{value!r}; expected {what} with commas between them") from None


def _drawable(_ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Return the path of a picture or page, None if it is not given; refuse it before a measurement.

    Raises ValueError for a wrong suffix or a missing matplotlib, BadParameter if its directory does not exist.
    """
    if path is None:
        return None
    from ..bench import plots

    if param.name == "plot":
        plots.check(path)
    else:
        plots.need_matplotlib()
    if not path.parent.is_dir():
        raise click.BadParameter(f"{path}: no directory {path.parent}")
    return path


subject_options = options(
    checkpoint_options,
    source_options,
    option("--config", type=GIVEN, help="Create a model with random weights from this config.json."),
    option("--layers", type=IntRange(1), help="With --config: only its first layers, this number."),
    option(
        "--q-bits",
        type=Choice(["2", "3", "4", "5", "6", "8", "16"]),
        help="With --config: bits per weight; 16 is not quantized.  [default: the file's, else 4]",
    ),
    option(
        "--q-group-size",
        type=Choice(["32", "64", "128"]),
        help="With --config: group size.  [default: the file's, else 64]",
    ),
    option(
        "--synth-rates",
        callback=partial(numbers, float),
        help="Draw acceptance at random: the rate per depth, such as 0.87,0.76,0.69; deeper rates fall alike.",
    ),
    option("--kernels", type=KERNELS, help="Metal kernels to use.  [default: decided by trials]"),
)
picture_options = options(
    option("--plot", type=WRITTEN, callback=_drawable, help="Picture of the result, a .png or .svg file."),
    option("--dark", is_flag=True, help="With --plot: a dark background."),
    option("--html", type=WRITTEN, callback=_drawable, help="HTML page with pictures and tables."),
)
result_options = options(
    option("--out", type=WRITTEN, help="JSON file for the result."),
    option("--json", "as_json", is_flag=True, help="Print the result as JSON instead of tables."),
    picture_options,
)
run_options = options(
    option("--rounds", type=IntRange(1), help="Number of rounds in which all contenders take turns."),
    option("--cooldown", type=FloatRange(0), help="Seconds of rest before each turn.  [default: 1 on a GPU]"),
    option("--quick", is_flag=True, help="Fewer measurements: under two minutes for the demo."),
    result_options,
)


def note_width(*, as_json: bool) -> None:
    """Before minutes of measurements, print a note on stderr if the terminal is narrower than the tables may be."""
    columns = terminal_size().columns
    if sys.stdout.isatty() and not as_json and columns < WIDTH:
        note = f"The tables have up to {WIDTH} columns, this terminal {columns}: widen it, or give --html FILE."
        click.echo(note, err=True)


def subject_of(flags: dict[str, Any]) -> "Subject":
    """Open the model that the options describe; on ranks above 0 also clear the output files in `flags`."""
    from .progress import loading, shows_progress

    note_width(as_json=flags["as_json"])
    if follows():
        flags.update(dict.fromkeys(("out", "plot", "html")))
    with loading(shown=shows_progress(quiet=False)):
        from ..bench.subject import open_subject

        logging.getLogger("transformers").setLevel(logging.ERROR)  # its warnings about long prompts are false
        bits, group_size = (flags[name] and int(flags[name]) for name in ("q_bits", "q_group_size"))
        given = {name: flags[name] for name in ("config", "layers", "kernels", "synth_rates")}
        given |= loaded_from(flags)
        return open_subject(**given, bits=bits, group_size=group_size, tensor_group=group())


def loaded_from(flags: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `open_subject` that state what is loaded; a --model of the hub is downloaded."""
    code, names = flags["trust_remote_code"], ("model", "mtp", "mtp_path", "draft_model", "draft_vocab")
    given = {name: flags[name] for name in (*names, "adapter_path", "vision", "vision_path")}
    if flags["model"] is not None:
        given["path"] = checkpoint_path(flags["model"], code=code, flags=flags)
    return {**given, "tokenizer_config": {"trust_remote_code": True}} if code else given


def cooldown_of(flags: dict[str, Any]) -> float:
    """Return the rest before each turn in seconds: --cooldown, else 1 on a GPU and 0 on a CPU."""
    import mlx.core as mx

    return float(mx.default_device() != mx.Device(mx.cpu)) if flags["cooldown"] is None else flags["cooldown"]


def bar() -> contextlib.AbstractContextManager[Callable[[str, int, int], None]]:
    """Show a bar on stderr if it is a terminal; yield a function of a description, the number done and the total."""
    from . import progress

    return progress.bar(shown=progress.shows_progress(quiet=False))


def console(*, as_json: bool) -> "Console":
    """Open a console for tables, at least as wide as the tables; with --json it prints nothing."""
    from rich.console import Console

    return Console(width=max(WIDTH, Console().width if sys.stdout.isatty() else 0), quiet=as_json)


def report(found: dict[str, Any], flags: dict[str, Any], remarks: Iterable[str]) -> None:
    """Print a result's tables and remarks, then write the requested files and JSON as `finish` does."""
    from ..bench.page import tables_of

    out = console(as_json=flags["as_json"])
    out.print(*tables_of(found))
    for remark in remarks:
        out.print(remark, highlight=False)
    finish(found, flags)


def finish(found: dict[str, Any], flags: dict[str, Any]) -> None:
    """Write the files of --out, --plot and --html; print JSON with --json, or if writing them fails."""
    from ..bench import result

    found = {**found, "command": shlex.join(["mlx-mtp", *sys.argv[1:]])}
    printed = flags["as_json"]
    try:
        if flags["out"]:
            result.write(found, flags["out"])
        draw([found], flags)
    except BaseException:
        printed = True  # else the measurement is lost
        raise
    finally:
        if printed:
            click.echo(json.dumps(found))


def draw(results: Sequence[dict[str, Any]], flags: dict[str, Any]) -> None:
    """Write the picture of --plot and the page of --html, if requested."""
    if flags["plot"]:
        from ..bench import plots

        plots.save(results, flags["plot"], dark=flags["dark"])
    if flags["html"]:
        from ..bench.page import page
        from ..machine.atomic import write_whole

        write_whole(flags["html"], page(results))


@contextlib.contextmanager
def complete(files: Sequence[Path]) -> Iterator[None]:
    """Convert errors caused by a damaged result file to a ValueError that names the files."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RecursionError) as e:
        names = ", ".join(map(str, files))
        raise ValueError(
            f"{names}: not a whole result of `mlx-mtp bench` ({type(e).__name__}: {e}); write it again"
        ) from e
