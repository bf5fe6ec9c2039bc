"""Encode pictures for Qwen3.5, 3.6 and 3.8: a ViT with learned and rotary positions, and a merger of 2 x 2 patches.

A patch has a learned position, interpolated from a square table, and its line and column turn the queries and keys.
Patches are ordered by blocks of 2 x 2, each of which becomes one row of the prompt. Source: transformers
`modeling_qwen3_5.py`.
"""

from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .attention import MLP, Attention
from .learned import interpolated, inverse_frequencies, stages_of
from .qwen_pixels import Pixels

__all__ = ["PREFIXES", "Pixels", "Tower", "find_mark", "find_written", "own_name"]

PREFIXES = ("model.visual.", "visual.", "vision_tower.")
EPS = 1e-6
THETA = 10000.0
STATES = 10  # arrays of a patch's state, its queries, keys and values that exist at once
PIECE = 4096  # patches that are copied to MLX at once: the copy holds Python's lock
STAGE = 4 * 10**12  # products and sums per stage: macOS ends a command that takes seconds


def own_name(name: str) -> str:
    """Return a tensor's name inside the tower."""
    return name.removeprefix(next(prefix for prefix in PREFIXES if name.startswith(prefix)))


def find_mark(config: dict) -> int:
    """Return the id of `<|image_pad|>`."""
    return int(config["image_token_id"])


def find_written(config: dict) -> tuple[int, ...]:
    """Return the ids of `<|vision_start|>`, `<|image_pad|>` and `<|vision_end|>`, without those that config lacks."""
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    return tuple(int(config[name]) for name in names if config.get(name) is not None)


def read_sizes(config: dict) -> Any:
    """Return the sizes in config.json's vision_config, as a namespace.

    ValueError for a tower of another kind, KeyError for a missing size.
    """
    vision = config["vision_config"]
    names = ("depth", "hidden_size", "num_heads", "intermediate_size", "out_hidden_size", "num_position_embeddings")
    found = SimpleNamespace(**{name: int(vision[name]) for name in names})
    defaults = {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3}
    vars(found).update({name: int(vision.get(name, value)) for name, value in defaults.items()})
    if vision.get("deepstack_visual_indexes"):
        raise ValueError("deepstack_visual_indexes: features of inner blocks are not supported; expected none")
    if (act := vision.get("hidden_act", "gelu_pytorch_tanh")) != "gelu_pytorch_tanh":
        raise ValueError(f"vision_config: hidden_act is {act!r}; supported is 'gelu_pytorch_tanh'")
    if found.hidden_size % (4 * found.num_heads):
        shape = f"vision_config: hidden_size is {found.hidden_size} and num_heads {found.num_heads}"
        raise ValueError(f"{shape}; expected a hidden_size that is a multiple of {4 * found.num_heads}")
    return found


class TowerBlock(nn.Module):
    def __init__(self, sizes: Any):
        super().__init__()
        size = sizes.hidden_size
        self.norm1, self.norm2 = nn.LayerNorm(size, eps=EPS), nn.LayerNorm(size, eps=EPS)
        self.attn = Attention(size, sizes.num_heads, ("qkv", "proj"), _turned)
        self.mlp = MLP(size, sizes.intermediate_size, ("linear_fc1", "linear_fc2"), nn.gelu_approx)

    def __call__(self, x: mx.array, turn: tuple[mx.array, mx.array]) -> mx.array:
        x = x + self.attn(self.norm1(x), turn)
        return x + self.mlp(self.norm2(x))


class Merger(nn.Module):
    """Maps patches [blocks * merge * merge, hidden] to rows of the language model [blocks, H]."""

    def __init__(self, sizes: Any):
        super().__init__()
        merged = sizes.hidden_size * sizes.spatial_merge_size**2
        self.norm = nn.LayerNorm(sizes.hidden_size, eps=EPS)
        self.linear_fc1, self.linear_fc2 = nn.Linear(merged, merged), nn.Linear(merged, sizes.out_hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.norm(x).reshape(-1, self.linear_fc1.bias.size)
        return self.linear_fc2(nn.gelu(self.linear_fc1(x)))


class Tower(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        sizes = read_sizes(config)
        self._sizes, self.width = sizes, sizes.out_hidden_size
        patch = sizes.in_channels * sizes.temporal_patch_size * sizes.patch_size**2
        self.patch_embed = nn.Linear(patch, sizes.hidden_size)
        self.pos_embed = nn.Embedding(sizes.num_position_embeddings, sizes.hidden_size)
        self.blocks = [TowerBlock(sizes) for _ in range(sizes.depth)]
        self.merger = Merger(sizes)

    def sanitized(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights by parameter path; the patches' convolution, channels second or last, is a matrix."""
        found = {name.replace("patch_embed.proj.", "patch_embed."): w for name, w in weights.items()}
        kernel = found.get("patch_embed.weight")
        if kernel is not None and kernel.ndim == 5:
            if kernel.shape[-1] == self._sizes.in_channels:  # MLX's order, with the channels last
                kernel = kernel.transpose(0, 4, 1, 2, 3)
            found["patch_embed.weight"] = kernel.reshape(kernel.shape[0], -1)
        return found

    def scratch(self, grid: tuple[int, int, int]) -> int:
        """Return the estimated bytes of temporary arrays while a picture is encoded. grid: as in `stages`."""
        sizes, width = self._sizes, self.patch_embed.bias.dtype.size
        patches = grid[1] * grid[2] * sizes.spatial_merge_size**2
        pixels = 4 * sizes.in_channels * sizes.temporal_patch_size * sizes.patch_size**2
        return patches * (pixels + STATES * sizes.hidden_size * width + sizes.intermediate_size * width)

    def stages(self, patches: np.ndarray, grid: tuple[int, int, int]) -> Iterator[mx.array]:
        """Yield, unevaluated, the state after every few blocks, and last the features [h * w, H] of a picture.

        Before the blocks, each embedded piece of PIECE patches is yielded if there are more patches than that.
        patches: [merge * merge * h * w, values], as `Pixels.patches` returns them. grid: (1, h, w), in rows of the
        prompt.
        """
        sizes = self._sizes
        merge, (_, height, width) = sizes.spatial_merge_size, grid
        lines, columns = _places(merge * height, merge * width, merge)
        x = yield from self._embedded(patches)
        x = x + self._positions(lines, columns).astype(x.dtype)
        turn = _angles(lines, columns, sizes.hidden_size // sizes.num_heads)
        count, size = x.shape
        cost = count * (8 * size**2 + 4 * size * sizes.intermediate_size + 4 * count * size)
        ends = stages_of(len(self.blocks), cost, STAGE)
        for i, block in enumerate(self.blocks):
            x = block(x, turn)
            if i in ends:
                yield x
        yield self.merger(x)

    def _embedded(self, patches: np.ndarray) -> Generator[mx.array, None, mx.array]:
        """Return the embedded patches [patches, hidden]; yield each piece of PIECE patches if there are several."""
        found = []
        for begin in range(0, len(patches), PIECE):
            piece = mx.array(patches[begin : begin + PIECE]).astype(self.patch_embed.bias.dtype)
            found.append(self.patch_embed(piece))
            if len(patches) > PIECE:
                yield found[-1]
        return mx.concatenate(found) if len(found) > 1 else found[0]

    def _positions(self, lines: np.ndarray, columns: np.ndarray) -> mx.array:
        """Return the learned positions of patches, float32 [patches, hidden], interpolated (see `interpolated`)."""
        side = int(self._sizes.num_position_embeddings**0.5)
        y, x = (places * ((side - 1) / max(places.max(), 1)) for places in (lines, columns))
        return interpolated(self.pos_embed, side, y, x)


def _places(height: int, width: int, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each patch's line and its column, in the order of blocks of merge x merge patches.

    height, width: of the picture, in patches.
    """
    numbers = np.indices((height, width)).reshape(2, height // merge, merge, width // merge, merge)
    lines, columns = numbers.transpose(0, 1, 3, 2, 4).reshape(2, -1)
    return lines, columns


def _angles(lines: np.ndarray, columns: np.ndarray, size: int) -> tuple[mx.array, mx.array]:
    """Return cosines and sines [patches, size / 2]: of the line for the first half, then of the column."""
    inverse = inverse_frequencies(size, THETA)
    angles = np.concatenate([place[:, None] * inverse for place in (lines, columns)], axis=1).astype(np.float32)
    return mx.cos(mx.array(angles)), mx.sin(mx.array(angles))


def _turned(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotate queries or keys [heads, patches, D], column i with column i + D / 2; computed in float32."""
    low, high = mx.split(x.astype(mx.float32), 2, axis=-1)
    return mx.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
