"""Compute decoder layers of Llama in PyTorch: matrix products in the weights' type, all else in float32."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
QKV = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
OUT, GATE, UP, DOWN = "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"
NORMS = "input_layernorm", "post_attention_layernorm"


class Sizes(NamedTuple):
    """Sizes of a model; the defaults are those of SmolLM2-135M. head: values of one attention head."""

    width: int = 576
    heads: int = 9
    kv_heads: int = 3
    head: int = 64
    layers: int = 30
    eps: float = 1e-5
    rope_base: float = 1e5
    vocabulary: int = 49_152

    @property
    def group(self) -> int:
        """Number of query heads that share a head of keys and values."""
        return self.heads // self.kv_heads


class Layer(NamedTuple):
    """Weights of a layer: its two norms in float32, and its matrices, those with the same input concatenated."""

    before_attention: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    before_mlp: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def layer_of(named: Mapping[str, torch.Tensor], prefix: str, dtype: torch.dtype) -> Layer:
    """Return the layer whose weights have the names prefix + mlx-lm's names; matrices in `dtype`."""
    before, after = (named[f"{prefix}{norm}.weight"] for norm in NORMS)
    joined = [
        torch.cat([named[f"{prefix}{x}.weight"] for x in names]) for names in (QKV, (OUT,), (GATE, UP), (DOWN,))
    ]
    qkv, out, gate_up, down = (matrix.to(dtype) for matrix in joined)
    return Layer(before, qkv, out, after, gate_up, down)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T in float32; the product is computed in the weight's type."""
    return F.linear(x.to(weight.dtype), weight).float()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Return the RMS norm of x [..., width]."""
    return F.rms_norm(x, (sizes.width,), weight, sizes.eps)


def rotations(length: int, sizes: Sizes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rotary embedding's cosines and sines of positions 0 to length - 1, each [length, 1, head / 2]."""
    rates = 1 / sizes.rope_base ** (torch.arange(0, sizes.head, 2, device=device) / sizes.head)
    angles = torch.arange(length, device=device)[:, None, None] * rates
    return angles.cos(), angles.sin()


def rotated(x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return x [B, L, heads, head] with the rotary embedding of L positions, whose `rotations` are `turns`."""
    (cos, sin), (a, b) = turns, x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def run_layer(
    x: torch.Tensor, w: Layer, sizes: Sizes, turns: tuple[torch.Tensor, torch.Tensor], attention: Attention
) -> torch.Tensor:
    """Return a layer's output [B, L, width] for its input x.

    turns: `rotations` of the L positions. attention: maps queries, keys and values [B, heads, L, head] in the
    matrices' type to the attention's output [B, heads, L, head].
    """
    rows, kv_width = x.shape[:2], sizes.kv_heads * sizes.head
    parts = linear(rms_norm(x, w.before_attention, sizes), w.qkv).split([w.out.shape[1], kv_width, kv_width], -1)
    q, k, v = (part.unflatten(-1, (-1, sizes.head)) for part in parts)
    q, k, v = (part.to(w.qkv.dtype).transpose(1, 2) for part in (rotated(q, turns), rotated(k, turns), v))
    x = x + linear(attention(q, k, v).transpose(1, 2).reshape(*rows, -1), w.out)
    gate, up = linear(rms_norm(x, w.before_mlp, sizes), w.gate_up).chunk(2, -1)
    return x + linear(F.silu(gate) * up, w.down)


def attend(mask: torch.Tensor, sizes: Sizes, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return attention of queries [B, heads, L, head] to keys and values [B, kv_heads, n, head].

    mask: bool [B, 1, L, n], True where a query attends to a key.
    """
    keys, values = (part.repeat_interleave(sizes.group, 1) for part in (k, v))
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
