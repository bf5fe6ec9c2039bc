"""Define the options of `mlx-mtp serve` for several models and for pictures."""

import re
from pathlib import Path

import click
from click import option

from .options import MODEL, code_option, gb_in_bytes, loading_options, options


def _size_in_bytes(_ctx: click.Context, _param: click.Parameter, value: str) -> int:
    """Return a size such as 512MB in bytes; BadParameter for another text."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d*)?) *(MB|GB)", value.strip(), re.IGNORECASE)
    if found is None:
        raise click.BadParameter(f"{value!r}: expected a size such as 512MB or 2GB")
    return int(float(found[1]) * {"MB": 1e6, "GB": 1e9}[found[2].upper()])


several_models_options = options(
    option("--model", "models", multiple=True, help=f"{MODEL}  Repeatable: requests choose one by its name."),
    option(
        "--models-dir",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Serve all models in this folder; requests choose one by its name.",
    ),
    option(
        "--max-memory",
        type=float,
        callback=gb_in_bytes,
        help="With several models: maximum GB after a load, for which the least recently used are unloaded.  "
        "[default: the memory that is free at the start]",
    ),
    code_option,
    loading_options,
)
picture_options = options(
    option(
        "--fetch-images",
        multiple=True,
        metavar="HOST[:PORT]",
        help="Host from which pictures of requests may be downloaded; repeatable.  [default: none]",
    ),
    option(
        "--vision-cache",
        default="512MB",
        callback=_size_in_bytes,
        metavar="SIZE",
        help="Maximum size of pictures' features that are kept, such as 512MB or 2GB.",
    ),
)
