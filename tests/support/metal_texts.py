"""Collect the texts that MLX would compile for groups of launches."""

from collections.abc import Iterator

from mlx_mtp.bench.kernel_launches import FORMATS, Launch, groups, spread
from mlx_mtp.emulator.texts import LaunchText, collected

GROUPS = groups(FORMATS)


def texts(launches: Iterator[Launch], few: int | None = None) -> list[LaunchText]:
    """Return the different texts of launches, or of a `few`, from the first to the last in even steps."""
    with collected() as found:
        for launch in launches if few is None else spread(launches, few):
            launch()
    return list(dict.fromkeys(found))
