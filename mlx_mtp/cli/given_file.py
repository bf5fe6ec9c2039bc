"""Define the type of options that name a file to read."""

from pathlib import Path
from typing import Any

import click


class GivenFile(click.Path):
    """Type of an option's value: an existing regular file, no device or pipe, which may have no end or no content.

    most: maximum bytes of the file, if it is read whole.
    """

    def __init__(self, most: int | None = None) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path: Any = super().convert(value, param, ctx)
        if not path.is_file():
            self.fail(f"{path} is not a file", param, ctx)
        if self.most is not None and (size := path.stat().st_size) > self.most:
            self.fail(f"{path}: {size:,} bytes; allowed are {self.most:,}", param, ctx)
        return path
