"""Collect the texts that MLX would compile for groups of launches."""

from collections.abc import Iterator

from mlx_mtp.bench.kernel_launches import FORMATS, Launch, groups, spread
from mlx_mtp.emulator.texts import LaunchText, collected

GROUPS = groups(FORMATS)
# Launches of each group that stand for all: every op, and each of the three types.
FEW = {
    "products affine-4-64": 6,
    "products affine-3-32": 3,
    "products mxfp8-8-32": 3,
    "products nvfp4-4-16": 3,
    "matrices affine-6-128": 3,
    "matrices mxfp4-4-32": 2,
    "experts affine-5-64": 4,
    "experts nvfp4-4-16": 2,
    "heads affine-8-64": 3,
    "heads mxfp4-4-32": 2,
    "attention mlx.core.bfloat16": 4,
    "attention mlx.core.float32": 2,
    "attention mlx.core.float16": 2,
    "dense": 4,
    "dense_heads": 4,
    "routers": 4,
    "latent": 6,
    "norms": 9,
    "recurrences": 9,
    "spellings": 9,
}


def texts(launches: Iterator[Launch], few: int | None = None) -> list[LaunchText]:
    """Return the different texts of launches, or of a `few`, from the first to the last in even steps."""
    with collected() as found:
        for launch in launches if few is None else spread(launches, few):
            launch()
    return list(dict.fromkeys(found))
