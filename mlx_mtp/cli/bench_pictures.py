"""Draw pictures and pages of `mlx-mtp bench`: every command's options, and `bench plot` for results on disk."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click

from .options import GIVEN, options

WRITTEN = click.Path(dir_okay=False, path_type=Path)


def _drawable(_ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Refuse what cannot be written before anything is measured."""
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


picture_options = options(
    click.option("--plot", type=WRITTEN, callback=_drawable, help="Draw the result into this .png or .svg file."),
    click.option("--dark", is_flag=True, help="With --plot, on dark paper."),
    click.option("--html", type=WRITTEN, callback=_drawable, help="Write pictures and tables as one page, to share."),
)


def draw(results: Sequence[dict[str, Any]], flags: dict[str, Any]) -> None:
    """Write the pictures and the page that were asked for."""
    if flags["plot"]:
        from ..bench import plots

        plots.save(results, flags["plot"], dark=flags["dark"])
    if flags["html"]:
        from ..bench.page import page
        from ..machine.atomic import write_whole

        write_whole(flags["html"], page(results))


@contextlib.contextmanager
def complete(files: Sequence[Path]) -> Iterator[None]:
    """Blame results on disk, which may have been cut or changed, for what goes wrong inside: no traceback."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, AssertionError, RecursionError) as e:
        names = ", ".join(map(str, files))
        raise ValueError(f"{names}: not a whole result of `mlx-mtp bench` ({type(e).__name__}: {e})") from e


@click.command("plot")
@click.argument("files", nargs=-1, required=True, type=GIVEN)
@picture_options
def plot(files: tuple[Path, ...], **flags: Any) -> None:
    """Draw results that other commands wrote with --out, or show them as a page: FILE..., with --plot or --html.

    Curves of cost and speed, acceptance by kind of prompt, phases, and published times over their floor.
    """
    from ..bench import result

    if not flags["plot"] and not flags["html"]:
        raise click.UsageError("nothing to write: --plot PICTURE, --html PAGE, or both")
    found = [result.read(file) for file in files]
    with complete(files):
        draw(found, flags)
