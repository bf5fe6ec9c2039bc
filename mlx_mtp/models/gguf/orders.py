"""Indices of rows or columns, in the released model's order, that undo the orders in which converters write them."""

import numpy as np


def unpermuted(rows: int, heads: int) -> np.ndarray:
    """Return indices [rows] that put each attention head's even rows before its odd ones.

    rows: of all heads together. Converters interleave the two halves of a head, whose rows RoPE rotates in pairs.
    """
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


def untiled(start: int, k_heads: int, v_heads: int, size: int) -> np.ndarray:
    """Return indices that group value heads, of `size` rows each, by key head again; the first `start` rows stay.

    v_heads: in all, a multiple of k_heads; the indices are [start + v_heads * size]. Converters write the first value
    head of every key head, then the second of every key head, and so on.
    """
    tiled = np.arange(v_heads * size).reshape(v_heads // k_heads, k_heads, size)
    return np.concatenate([np.arange(start), start + tiled.swapaxes(0, 1).reshape(-1)])


def interleaved(k_heads: int, *sizes: int) -> np.ndarray:
    """Return indices that order rows by key head, of rows that are stored part after part.

    sizes: for each part, its number of rows per key head.
    """
    starts = np.cumsum([0, *(k_heads * size for size in sizes)])
    parts = [s + np.arange(k_heads * n).reshape(k_heads, n) for s, n in zip(starts, sizes, strict=False)]
    return np.concatenate(parts, axis=1).reshape(-1)
