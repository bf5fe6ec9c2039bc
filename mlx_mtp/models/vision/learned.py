"""Interpolate learned positions from a square table for the patches of a picture."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np


def interpolated(embed: Callable[[mx.array], mx.array], side: int, y: np.ndarray, x: np.ndarray) -> mx.array:
    """Return the learned positions of n patches, float32 [n, hidden]: four rows of a table each, weighted bilinearly.

    embed: returns the rows of the table [side * side, hidden] at an array of indices. y, x: the patches' places in
    the table, float [n], from 0 to side - 1.
    """
    (low_y, high_y, y), (low_x, high_x, x) = (_neighbours(places, side) for places in (y, x))
    corners = [(low_y, low_x), (low_y, high_x), (high_y, low_x), (high_y, high_x)]
    numbers = mx.array(np.stack([row * side + column for row, column in corners]))
    weights = mx.array(np.stack([(1 - y) * (1 - x), (1 - y) * x, y * (1 - x), y * x]).astype(np.float32))
    return (embed(numbers).astype(mx.float32) * weights[..., None]).sum(axis=0)


def _neighbours(places: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the indices of the entries below and above places on one axis, and the weights of those above.

    side: number of entries on the axis.
    """
    low = np.minimum(places.astype(int), side - 1)
    return low, np.minimum(low + 1, side - 1), places - low


def inverse_frequencies(head_size: int, theta: float) -> np.ndarray:
    """Return the frequencies [head_size / 4] with which one of two axes turns a head's columns."""
    return 1.0 / theta ** (np.arange(0, head_size // 2, 2, dtype=np.float32) / (head_size // 2))


def stages_of(layers: int, cost: int, most: int) -> set[int]:
    """Return the indices of layers after which a command ends, so that no command costs more than `most`.

    A layer that costs more has a command of its own. cost: products and sums of one layer.
    """
    step = max(1, most // cost)
    return {i for i in range(layers) if (i + 1) % step == 0}
