"""Define the options for pictures, with mlx_vlm's names, and open the pictures before the model is loaded."""

from typing import Any

import click
from click import IntRange, option

from .options import options
from .together import follows

SEVERAL = ("--image", "--resize-shape")


class WithImages(click.Command):
    """A command whose options for pictures take several values, as in mlx_vlm: `--image A B`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spread(args))


def spread(args: list[str]) -> list[str]:
    """Return arguments in which each value of an option of SEVERAL has the option's name before it.

    `--image A B` becomes `--image A --image B`. Arguments from `--` on are unchanged.
    """
    found: list[str] = []
    name, values = "", 0
    for i, arg in enumerate(args):
        if arg == "--":
            return [*found, *args[i:]]
        if arg.startswith("-") and not (name and not values):
            option, equals, _ = arg.partition("=")
            name, values = (option, int(bool(equals))) if option in SEVERAL else ("", 0)
            found.append(arg)
        else:
            found += [name, arg] if name and values else [arg]
            values += 1
    return found


def _open(_ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> list[Any]:
    """Return the opened images of --image; on a rank above 0 their paths, since rank 0 opens them.

    Raises BadParameter for one that cannot be opened.
    """
    if not value or follows():
        return list(value)
    from ..pictures.image import open_image

    try:
        return [open_image(path, number=number) for number, path in enumerate(value, 1)]
    except ValueError as e:
        raise click.BadParameter(str(e)) from None


def _shape(_ctx: click.Context, _param: click.Parameter, value: tuple[int, ...]) -> tuple[int, ...] | None:
    if len(value) > 2:
        raise click.BadParameter(f"{len(value)} numbers; allowed are a width and a height, or one number for both")
    return value or None


image_options = options(
    option(
        "--image",
        "images",
        multiple=True,
        callback=_open,
        metavar="FILE...",
        help="Pictures before the message: PNG, JPEG, WEBP or GIF files.",
    ),
    option(
        "--resize-shape",
        multiple=True,
        type=IntRange(1, 1 << 16),
        callback=_shape,
        metavar="W [H]",
        help="Scale each picture, with its ratio kept, to fit this width and height in pixels; H is W by default.",
    ),
)
