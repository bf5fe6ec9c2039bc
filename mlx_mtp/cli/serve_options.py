"""Define the options of `mlx-mtp serve` for several models and for pictures."""

from pathlib import Path

import click
from click import option

from .options import MODEL, code_option, loading_options, options
from .sizes import SIZE

several_models_options = options(
    option("--model", "models", multiple=True, help=f"{MODEL}  Repeatable: requests choose one by its name."),
    option(
        "--models-dir",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Serve all models in this folder and up to four levels below; requests choose one by its name.",
    ),
    option(
        "--max-memory",
        type=SIZE,
        help="With several models: maximum memory after a load, such as 8GB; the least recently used are unloaded "
        "for it.  [default: the memory that is free at the start]",
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
        type=SIZE,
        help="Maximum size of pictures' features that are kept, such as 512MB or 2GB.",
    ),
)
