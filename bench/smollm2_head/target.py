"""Run SmolLM2 in PyTorch: all positions of joined conversations at once, or one position after the other."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from .network import Sizes, attend, layer_of, rms_norm, rotations, run_layer

ROWS_AT_ONCE = 8192  # of the logits over the whole vocabulary, which limits their memory
NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(file: Path, sizes: Sizes = Sizes()) -> dict[str, torch.Tensor]:  # noqa: B008 (immutable)
    """Return the weights of a GGUF file in float32, by mlx-lm's names without the prefix `model.`."""
    from gguf import GGUFReader, dequantize

    found = {}
    for tensor in GGUFReader(file).tensors:
        weight = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        *layer, name, _ = tensor.name.removeprefix("blk.").split(".")
        if name in ("attn_q", "attn_k"):  # llama.cpp stores the rotary embedding's pairs next to each other
            pairs = weight.reshape(-1, sizes.head // 2, 2, weight.shape[-1])
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        prefix = f"layers.{layer[0]}." if layer else ""
        found[f"{prefix}{NAMES[name]}.weight"] = torch.from_numpy(np.ascontiguousarray(weight))
    return found


class Target:
    """A model whose LM head is its embedding; `length` is the highest number of positions in a row.

    weights: as `read_gguf` returns them. dtype: of the matrices and of the cache. norm: the last norm's weight.
    """

    def __init__(
        self, weights: Mapping[str, torch.Tensor], sizes: Sizes, length: int, dtype: torch.dtype, device: torch.device
    ):
        weights = {name: weight.to(device) for name, weight in weights.items()}
        self.sizes, self.length, self.dtype, self.device = sizes, length, dtype, device
        self.embedding, self.norm = weights["embed_tokens.weight"], weights["norm.weight"]
        self.unembedding = self.embedding.to(dtype)
        self.layers = [layer_of(weights, f"layers.{i}.", dtype) for i in range(sizes.layers)]
        self.turns = rotations(length, sizes, device)
        last = f"layers.{sizes.layers - 1}."
        self.last_layer = {name.removeprefix(last): w for name, w in weights.items() if name.startswith(last)}

    def turns_of(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotary embedding's `rotations` of the positions from `first` to `end` - 1."""
        cos, sin = self.turns
        return cos[first:end], sin[first:end]

    @torch.no_grad()
    def read(self, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (normed hidden rows, float32 [B, L, width]; most likely token after each position, int64 [B, L]).

        mask: bool [B, 1, L, L], as in `attend`.
        """
        x, turns = self.embedding[tokens], self.turns_of(0, tokens.shape[1])
        for layer in self.layers:
            x = run_layer(x, layer, self.sizes, turns, partial(attend, mask, self.sizes))
        rows = rms_norm(x, self.norm, self.sizes)
        flat = rows.to(self.dtype).reshape(-1, self.sizes.width).split(ROWS_AT_ONCE)
        choices = torch.cat([F.linear(part, self.unembedding).argmax(-1) for part in flat])
        return rows, choices.view(tokens.shape)

    def cache(self, rows: int) -> torch.Tensor:
        """Return an empty cache for `step`, [layers, keys and values, rows, kv_heads, length, head]."""
        shape = self.sizes.layers, 2, rows, self.sizes.kv_heads, self.length, self.sizes.head
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    @torch.no_grad()
    def step(self, tokens: torch.Tensor, place: int, starts: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """Return the logits [B, V] after one more token of each row, and store its keys and values in the cache.

        tokens: int64 [B], at position `place` of their rows. starts: int64 [B], the first position that each attends
        to.
        """
        first = int(starts.min())
        seen = torch.arange(first, place + 1, device=self.device) >= starts[:, None]
        mask = torch.where(seen, 0.0, -1e9)[:, None, None].to(self.dtype)
        x, turns = self.embedding[tokens][:, None], self.turns_of(place, place + 1)
        for layer, (keys, values) in zip(self.layers, cache, strict=True):
            attention = partial(attend_cached, keys, values, first, place, mask)
            x = run_layer(x, layer, self.sizes, turns, attention)
        return F.linear(rms_norm(x[:, 0], self.norm, self.sizes).to(self.dtype), self.unembedding)


def attend_cached(
    keys: torch.Tensor,
    values: torch.Tensor,
    first: int,
    place: int,
    mask: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> torch.Tensor:
    """Store k and v [B, kv_heads, 1, head] at `place` of a layer's cache, and return the attention of q to its rows.

    keys, values: [B, kv_heads, length, head], of which the positions from `first` to `place` are read. mask: added to
    the scores, [B, 1, 1, positions]. q and the result: [B, heads, 1, head].
    """
    keys[:, :, place], values[:, :, place] = k[:, :, 0], v[:, :, 0]
    grouped = q.reshape(*k.shape[:2], -1, q.shape[-1]) * q.shape[-1] ** -0.5
    scores = grouped @ keys[:, :, first : place + 1].transpose(-1, -2) + mask
    found = scores.float().softmax(-1).to(q.dtype) @ values[:, :, first : place + 1]
    return found.reshape(q.shape)
