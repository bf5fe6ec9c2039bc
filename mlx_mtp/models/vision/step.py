"""Encode pictures for Step-3.7-Flash: a ViT with learned and rotary positions, two convolutions and a projector.

Each view of a picture, a tile or the overview, is encoded alone. The marks around and between views are rows of the
picture, too, with the language model's embeddings as features; positions are those of text. Sources: transformers
`modeling_step3p7.py`, `conversion_mapping.py` ("step3p5_vision"), `processing_step3p7.py`.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .attention import MLP, Attention
from .learned import interpolated, inverse_frequencies, stages_of
from .step_tiles import FEATURE, STRIDE, Pixels, Views

__all__ = ["PREFIXES", "Pixels", "Tower", "find_mark", "find_written", "own_name"]

PREFIXES = ("vision_model.", "vit_large_projector.")
THETA = 10000.0
STAGE = 4 * 10**12  # products and sums per stage: macOS ends a command that takes seconds
STATES = 10  # arrays of a patch's state, its queries, keys and values that exist at once
ONLY = {"hidden_act": "quick_gelu", **dict.fromkeys(("use_cls_token", "use_ln_post"), False)}
ONLY |= dict.fromkeys(("use_ln_pre", "use_abs_posemb", "use_rope2d"), True)


def find_mark(config: dict) -> int:
    """Return the id of `<im_patch>`: config.json's image_token_id, by default 128001."""
    return int(config.get("image_token_id", 128001))


def find_written(config: dict) -> tuple[int, ...]:
    """Return the id of `<im_patch>` alone: the other marks are rows of the picture."""
    return (find_mark(config),)


def own_name(name: str) -> str:
    """Return a tensor's name inside the tower; the projector's begins with `projector.`."""
    tower, projector = PREFIXES
    return name.removeprefix(tower) if name.startswith(tower) else f"projector.{name.removeprefix(projector)}"


def read_sizes(config: dict) -> Any:
    """Return the sizes in config.json's vision_config, or their released values, as a namespace.

    ValueError for a tower of another kind; KeyError without vision_config or the language model's hidden_size.
    """
    vision = config["vision_config"]
    for name, value in ONLY.items():
        if (found := vision.get(name, value)) != value:
            raise ValueError(f"vision_config: {name} is {found!r}; supported is {value!r}")
    found = SimpleNamespace(
        width=int(vision.get("width", 1536)),
        layers=int(vision.get("layers", 47)),
        heads=int(vision.get("heads", 16)),
        image_size=int(vision.get("image_size", 728)),
        patch_size=int(vision.get("patch_size", 14)),
        eps=float(vision.get("layer_norm_eps", 1e-5)),
        features=int(config.get("text_config", config)["hidden_size"]),
    )
    found.inner = int(found.width * vision.get("mlp_ratio", 8960 / 1536))
    if found.width % (4 * found.heads):
        shape = f"vision_config: width is {found.width} and heads {found.heads}"
        raise ValueError(f"{shape}; expected a width that is a multiple of {4 * found.heads}")
    return found


class Scale(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.gamma = mx.ones(size)


class TowerBlock(nn.Module):
    def __init__(self, sizes: Any):
        super().__init__()
        size = sizes.width
        self.ln_1, self.ln_2 = nn.LayerNorm(size, eps=sizes.eps), nn.LayerNorm(size, eps=sizes.eps)
        self.ls_1, self.ls_2 = Scale(size), Scale(size)
        self.attn = Attention(size, sizes.heads, ("in_proj", "out_proj"), _turned)
        self.mlp = MLP(size, sizes.inner, ("c_fc", "c_proj"), nn.gelu_fast_approx)

    def __call__(self, x: mx.array, turn: tuple[mx.array, mx.array]) -> mx.array:
        x = x + self.ls_1.gamma * self.attn(self.ln_1(x), turn)
        return x + self.ls_2.gamma * self.mlp(self.ln_2(x))


class Tower(nn.Module):
    """The tower and its projector. embed: set by the loader; returns the language model's embeddings of token ids."""

    embed: Any

    def __init__(self, config: dict):
        super().__init__()
        self._sizes = sizes = read_sizes(config)
        self.width, size = sizes.features, sizes.width
        self.conv1 = nn.Conv2d(3, size, sizes.patch_size, stride=sizes.patch_size, bias=False)
        self.positional_embedding = mx.zeros(((sizes.image_size // sizes.patch_size) ** 2, size))
        self.ln_pre = nn.LayerNorm(size, eps=sizes.eps)
        self.transformer = [TowerBlock(sizes) for _ in range(sizes.layers)]
        self.vit_downsampler1 = nn.Conv2d(size, 2 * size, 3, stride=2, padding=1)
        self.vit_downsampler2 = nn.Conv2d(2 * size, 4 * size, 3, stride=2, padding=1)
        self.projector = nn.Linear(4 * size, sizes.features, bias=bool(config.get("projector_bias", False)))

    def sanitized(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Return the weights by parameter path; convolutions, channels second or last, in MLX's order of axes."""
        found = {}
        for name, w in weights.items():
            name = name.replace("transformer.resblocks.", "transformer.").replace(".in_proj_", ".in_proj.")
            if w.ndim == 4 and w.shape[1] != w.shape[2]:  # the channels before the height and the width
                w = w.transpose(0, 2, 3, 1)
            found[name] = w
        return found

    def scratch(self, grid: tuple[int, int, int]) -> int:
        """Return the estimated bytes of temporary arrays while a picture is encoded, one view at a time.

        grid: (1, 1, rows), the picture's number of rows of the prompt.
        """
        sizes, width = self._sizes, self.conv1.weight.dtype.size
        patches = (sizes.image_size // sizes.patch_size) ** 2
        return patches * (STATES * sizes.width + sizes.inner) * width + grid[2] * self.width * width

    def stages(self, views: Views, grid: tuple[int, int, int]) -> Iterator[mx.array]:
        """Yield, unevaluated, the state after every few layers of each view, and last the features of the picture.

        The features are [rows, H], with the marks' embeddings in their places. Each view's features are yielded, too.
        views: from `Pixels.patches`. grid: unused.
        """
        rows = []
        for pixels in views.pixels:
            for x in self._view(mx.array(pixels)):
                yield x
            rows.append(x)
        tokens = np.array(views.tokens)
        marks = self.embed(mx.array(tokens[tokens != FEATURE]))
        order = np.empty(tokens.size, int)
        order[tokens == FEATURE] = np.arange((tokens == FEATURE).sum())
        order[tokens != FEATURE] = (tokens == FEATURE).sum() + np.arange((tokens != FEATURE).sum())
        yield mx.concatenate([*rows, marks], axis=0)[mx.array(order)]

    def _view(self, pixels: mx.array) -> Iterator[mx.array]:
        """Yield the state after every few layers, and last the features [n, H]. pixels: a view's, [side, side, 3]."""
        sizes, size = self._sizes, self._sizes.width
        x = self.conv1(pixels[None].astype(self.conv1.weight.dtype))
        side = x.shape[1]
        lines, columns = (places.reshape(-1) for places in np.indices((side, side)))
        table = sizes.image_size // sizes.patch_size
        y, x_at = (np.clip((places + 0.5) * table / side - 0.5, 0, table - 1) for places in (lines, columns))
        learned = interpolated(lambda numbers: self.positional_embedding[numbers], table, y, x_at)
        x = self.ln_pre(x.reshape(-1, size) + learned.astype(x.dtype))
        inverse = inverse_frequencies(size // sizes.heads, THETA)
        angles = mx.array(np.concatenate([place[:, None] * inverse for place in (columns, lines)], axis=1))
        turn = mx.cos(angles), mx.sin(angles)
        cost = len(x) * (8 * size**2 + 4 * size * sizes.inner + 4 * len(x) * size)
        ends = stages_of(len(self.transformer), cost, STAGE)
        for i, block in enumerate(self.transformer):
            x = block(x, turn)
            if i in ends:
                yield x
        x = self.vit_downsampler2(self.vit_downsampler1(x.reshape(1, side, side, size)))
        yield self.projector(x.reshape(-1, STRIDE * size))


def _turned(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Rotate queries or keys [heads, patches, D], column 2 i with column 2 i + 1; computed in float32."""
    pairs = x.astype(mx.float32).reshape(*x.shape[:-1], -1, 2)
    low, high = pairs[..., 0], pairs[..., 1]
    return mx.stack([low * cos - high * sin, high * cos + low * sin], axis=-1).reshape(x.shape).astype(x.dtype)
