"""The head of an external drafter: one decoder layer whose attention reads [embedding, hidden] at full width.

Source: EAGLE-3 (arXiv 2503.01840).
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .spec import MTPSpec


@dataclass(frozen=True)
class DraftSizes:
    """Shapes that the layer does not tell.

    captured: features of each hidden state that the target gives; vocab: of the target and of the LM head.
    window: of the attention, None where it sees everything. residual_normed: the residual is `hidden_norm`'s output.
    """

    hidden: int
    captured: int
    vocab: int
    draft_vocab: int
    eps: float
    window: int | None
    residual_normed: bool


class DraftHead(nn.Module):
    """What MTPHead is for heads inside a checkpoint. `block` is a Llama-like layer, whose projections are widened.

    `parts`: which of the optional "input_norm" (of all captured states), "fc_norm" (of each), "d2t" there are.
    """

    NO_KV_BITS: str | None = None  # its attention is an ordinary one, whatever the target's is

    @property
    def attention(self) -> type:
        return type(self.block.self_attn)

    def __init__(self, spec: MTPSpec, block: Any, sizes: DraftSizes, parts: set[str]):
        super().__init__()
        self._spec, self._residual_normed, self.window = spec, sizes.residual_normed, sizes.window
        self.head_dim = block.self_attn.k_proj.weight.shape[0] // block.self_attn.n_kv_heads
        H, fused = sizes.hidden, len(spec.capture) * sizes.captured
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = block.self_attn[name]
            block.self_attn[name] = nn.Linear(2 * H, narrow.weight.shape[0], bias="bias" in narrow)
        self.block = block
        self.hidden_norm, self.norm = nn.RMSNorm(H, eps=sizes.eps), nn.RMSNorm(H, eps=sizes.eps)
        self.fc = nn.Linear(fused, H, bias=False)
        if "input_norm" in parts:
            self.input_norm = nn.RMSNorm(fused, eps=sizes.eps)
        if "fc_norm" in parts:
            self.fc_norm = [nn.RMSNorm(sizes.captured, eps=sizes.eps) for _ in spec.capture]
        if spec.embedding == "own":
            self.embed_tokens = nn.Embedding(sizes.vocab, H)
        if spec.head == "own":
            self.head = nn.Linear(H, sizes.draft_vocab, bias=False)
        if "d2t" in parts:
            self.d2t = mx.zeros((sizes.draft_vocab,), mx.int64)

    def fused(self: Any, captured: mx.array) -> mx.array:
        """The target's hidden states, side by side [B, L, n * Ht] -> [B, L, H]."""
        if "input_norm" in self:
            captured = self.input_norm(captured)
        if "fc_norm" in self:
            states = mx.split(captured, len(self.fc_norm), axis=-1)
            captured = mx.concatenate([norm(h) for norm, h in zip(self.fc_norm, states, strict=True)], axis=-1)
        return self.fc(captured)

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        """Embeddings of the next tokens and hidden states [B, L, H] -> output [B, L, H], before the norm."""
        normed = self.hidden_norm(hidden)
        pair = [self.block.input_layernorm(embeddings), normed]
        if self._spec.fuse == "he":
            pair.reverse()
        mask = cache.make_mask(hidden.shape[1])
        x = normed if self._residual_normed else hidden
        x = x + self.block.self_attn(mx.concatenate(pair, axis=-1), mask, cache)
        return x + self.block.mlp(self.block.post_attention_layernorm(x))

    def feedback(self, output: mx.array, hidden: mx.array) -> mx.array:
        """What the next draft reads after this head gave `output` [B, L, H]."""
        return output if self._spec.feedback == "pre" else self.norm(output)

    def token(self: Any, row: mx.array) -> mx.array:
        """The target's token that a row of the LM head stands for: `d2t` holds the differences."""
        return row + mx.take(self.d2t, row) if "d2t" in self else row
