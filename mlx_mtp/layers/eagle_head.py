"""Run the head of an external drafter: one decoder layer whose attention reads [embedding, hidden] at full width.

Source: EAGLE-3 (arXiv 2503.01840).
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .mtp_head import MTPHead
from .mtp_spec import MTPSpec


@dataclass(frozen=True)
class EagleSizes:
    """Sizes that the decoder layer does not tell.

    hidden: features of the drafter; captured: of each hidden state that the target gives. vocab, draft_vocab: tokens
    of the target and of the LM head. eps: of the norms. window: positions that the attention sees, None for all.
    residual_normed: the residual is `hidden_norm`'s output, not its input.
    """

    hidden: int
    captured: int
    vocab: int
    draft_vocab: int
    eps: float
    window: int | None
    residual_normed: bool


class EagleHead(MTPHead):
    """An MTP head of EAGLE's form around `block`, a Llama-like layer whose projections it widens.

    `parts`: which of the optional "input_norm" (of all captured states), "fc_norm" (of each) and "d2t" there are.
    """

    NO_KV_BITS: str | None = None  # its attention is an ordinary one, whatever the target's is

    def __init__(self, spec: MTPSpec, block: Any, sizes: EagleSizes, parts: set[str]):
        nn.Module.__init__(self)  # of MTPHead it has the methods, not the modules
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

    @property
    def attention(self) -> type:
        """The class of its attention, for kernels."""
        return type(self.block.self_attn)

    def fused(self: Any, captured: mx.array) -> mx.array:
        """Fuse the target's n hidden states, side by side [B, L, n * captured], to [B, L, H]."""
        if "input_norm" in self:
            captured = self.input_norm(captured)
        if "fc_norm" in self:
            states = mx.split(captured, len(self.fc_norm), axis=-1)
            captured = mx.concatenate([norm(h) for norm, h in zip(self.fc_norm, states, strict=True)], axis=-1)
        return self.fc(captured)

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        normed = self.hidden_norm(hidden)
        pair = [self.block.input_layernorm(embeddings), normed]
        if self._spec.fuse == "he":
            pair.reverse()
        mask = cache.make_mask(hidden.shape[1])
        x = normed if self._residual_normed else hidden
        x = x + self.block.self_attn(mx.concatenate(pair, axis=-1), mask, cache)
        return x + self.block.mlp(self.block.post_attention_layernorm(x))
