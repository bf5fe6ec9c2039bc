"""Define the types of options for files to read and for sizes in memory, and find the text files in a path."""

from pathlib import Path
from typing import Any

import click

MOST_GB = 2**20


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


class SizeType(click.ParamType):
    """Type of an option whose text is a size, such as 512MB or 2GB, or a number of GB; its value is in bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = value.strip().upper()
        number, unit = (text[:-2], text[-2:]) if text.endswith(("MB", "GB")) else (text, "GB")
        try:
            size = float(number) * {"MB": 1e6, "GB": 1e9}[unit]
        except ValueError:
            self.fail(f"{value!r}: expected a size such as 512MB or 2GB", param, ctx)
        if not 0 <= size <= MOST_GB * 1e9:  # also refuses NaN
            self.fail(f"{value}: allowed is 0 to {MOST_GB} GB", param, ctx)
        return int(size)


SIZE = SizeType()


def text_files(path: Path) -> list[Path]:
    """Return [path] for a file; for a directory the files at any depth in it, sorted by path.

    Hidden files and directories in it, whose names begin with a dot, are left out; [] if there is no other file.
    """
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [f for f in files if f.is_file() and not any(part.startswith(".") for part in f.relative_to(path).parts)]
