"""Collect the texts that MLX would compile for groups of launches."""

from collections.abc import Iterator
from contextlib import contextmanager

from mlx_mtp.bench.kernel_launches import FORMATS, TimedLaunch, groups, spread
from mlx_mtp.emulator.texts import LaunchText, recorded

GROUPS = groups(FORMATS)
# The number of launches per group that cover every op and each of the three types.
FEW = {
    "products affine-4-64": 6,
    "products affine-3-32": 2,
    "products mxfp8-8-32": 3,
    "matrices affine-6-128": 6,
    "matrices mxfp4-4-32": 2,
    "experts affine-5-64": 3,
    "experts nvfp4-4-16": 2,
    "heads affine-8-64": 3,
    "products iq4_xs-4-32": 2,
    "experts q6_k-6-16": 2,
    "attention mlx.core.bfloat16": 3,
    "attention mlx.core.float32": 2,
    "attention mlx.core.float16": 2,
    "dense": 3,
    "dense_heads": 3,
    "dense_matrices": 3,
    "routers": 3,
    "choices": 3,
    "probes": 2,
    "latent": 3,
    "norms": 9,
    "recurrences": 7,
    "spellings": 5,
}


@contextmanager
def collected() -> Iterator[list[LaunchText]]:
    """Yield a list that holds the text of every launch once the block ends without an error; outputs are zeros."""
    texts: list[LaunchText] = []
    with recorded() as found:
        yield texts
        texts += [each.text for each in found]


def texts(launches: Iterator[TimedLaunch], few: int | None = None) -> list[LaunchText]:
    """Return the distinct texts of launches, or of `few` evenly spaced ones."""
    with collected() as found:
        for launch in launches if few is None else spread(launches, few):
            launch()
    return list(dict.fromkeys(found))
