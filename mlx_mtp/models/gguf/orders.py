"""Undo the orders in which converters write rows and columns: indices of what is to stand where."""

import numpy as np


def unpermuted(rows: int, heads: int) -> np.ndarray:
    """Undo the interleaving of the halves of each attention head, which pairs of RoPE are there."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def untiled(start: int, k_heads: int, v_heads: int, size: int) -> np.ndarray:
    """Undo the tiling of value heads: group those of a key head again, `size` rows each, behind `start` others."""
    tiled = np.arange(v_heads * size).reshape(v_heads // k_heads, k_heads, size)
    return np.concatenate([np.arange(start), start + tiled.swapaxes(0, 1).reshape(-1)])


def interleaved(k_heads: int, *sizes: int) -> np.ndarray:
    """Put rows that lie part after part, each of `sizes` a key head, in order of the key heads."""
    starts = np.cumsum([0, *(k_heads * size for size in sizes)])
    parts = [s + np.arange(k_heads * n).reshape(k_heads, n) for s, n in zip(starts, sizes, strict=False)]
    return np.concatenate(parts, axis=1).reshape(-1)
