"""Define the type of options whose value is a size in memory."""

from typing import Any

import click

MOST_GB = 2**20


class Size(click.ParamType):
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


SIZE = Size()
