"""Attention of all patches of a picture to each other, in pieces that need little memory and time, and an MLP."""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

FUSED = (64, 80, 128)  # head sizes of MLX's fused attention; for others it stores all scores
CPU_PAIRS = 1 << 21  # scores per head and piece on a CPU, where all scores of a piece are stored
GPU_PAIRS = 1 << 28  # macOS ends a command that takes seconds


class Attention(nn.Module):
    """Attention of all patches. names: of its projections. turned: rotates queries or keys by cosines and sines."""

    def __init__(self, size: int, heads: int, names: tuple[str, str], turned: Callable[..., mx.array]):
        super().__init__()
        self.heads, self._names, self._turned = heads, names, turned
        self[names[0]], self[names[1]] = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def __call__(self, x: mx.array, turn: tuple[mx.array, mx.array]) -> mx.array:
        into, out = (self[name] for name in self._names)
        qkv = into(x).reshape(x.shape[0], 3, self.heads, -1).transpose(1, 2, 0, 3)
        queries, keys = (self._turned(part, *turn) for part in qkv[:2])
        found = attend(queries[None], keys[None], qkv[2][None])
        return out(found[0].transpose(1, 0, 2).reshape(x.shape))


class MLP(nn.Module):
    """Two projections, whose names are `names`, with an activation between them."""

    def __init__(self, size: int, inner: int, names: tuple[str, str], activation: Callable[[mx.array], mx.array]):
        super().__init__()
        self._names, self._activation = names, activation
        self[names[0]], self[names[1]] = nn.Linear(size, inner), nn.Linear(inner, size)

    def __call__(self, x: mx.array) -> mx.array:
        into, out = (self[name] for name in self._names)
        return out(self._activation(into(x)))


def attend(queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """Return the attention [1, heads, patches, D] of queries to keys, each [1, heads, patches, D], without a mask.

    Many patches are computed in several pieces, each of which is evaluated; else the result is unevaluated.
    """
    size = queries.shape[-1]
    padded = next((fused for fused in FUSED if size <= fused), size)
    queries, keys, values = (_padded(x, padded - size) for x in (queries, keys, values))
    pairs = CPU_PAIRS if mx.default_device() == mx.cpu else GPU_PAIRS
    step = max(1, pairs // keys.shape[2])
    found = []
    for begin in range(0, queries.shape[2], step):
        piece = queries[:, :, begin : begin + step]
        found.append(mx.fast.scaled_dot_product_attention(piece, keys, values, scale=size**-0.5)[..., :size])
        if queries.shape[2] > step:
            mx.eval(found[-1])
    return mx.concatenate(found, axis=2) if len(found) > 1 else found[0]


def _padded(x: mx.array, columns: int) -> mx.array:
    """Return an array with this number of columns of zeros appended to its last axis."""
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, columns)]) if columns else x
