"""Run one MTP module ("nextn layer") or external drafter head: fuse embedding and hidden state, run one block.

Sources: DeepSeek-V3 technical report (arXiv 2412.19437), section 2.2, whose tensor names are used here; EAGLE-3
(arXiv 2503.01840).
"""

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .mtp_spec import MTPSpec


class MTPHead(nn.Module):
    """An MTP head, which contains `block`, a decoder layer of the family.

    Its norms have the class, size and eps of `final`, the target's last norm. `mask_array`: the block needs its mask
    as an array. A port sets `window`, the number of last positions that the block's attention reads, unless it reads
    all.
    """

    window: int | None = None

    def __init__(self, spec: MTPSpec, block: nn.Module, final: Any, vocab_size: int, *, mask_array: bool):
        super().__init__()
        self._spec, self._mask_array, hidden_size = spec, mask_array, final.weight.size
        norm = partial(type(final), hidden_size, eps=final.eps)
        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.block = block
        self.norm = norm()
        if spec.embedding == "own":
            self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        if spec.head == "own":
            self.head = nn.Linear(hidden_size, vocab_size, bias=False)
        if spec.draft_vocab:
            self.d2t = mx.zeros((spec.draft_vocab,), mx.int32)

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        """Map the next tokens' embeddings and hidden states [B, L, H] to outputs [B, L, H], before the norm.

        The block writes its keys and values of these L positions to `cache`.
        """
        e, h = self.enorm(embeddings), self.hnorm(hidden)
        pair = [e, h] if self._spec.fuse == "eh" else [h, e]
        x = self.eh_proj(mx.concatenate(pair, axis=-1))
        return self.block(x, cache.make_mask(x.shape[1], return_array=self._mask_array), cache)

    def feedback(self, output: mx.array, hidden: mx.array) -> mx.array:
        """Return the next draft's hidden input, after this head mapped `hidden` to `output`; all are [B, L, H].

        The input is `hidden` with topology "target_each", else `output`, normed if the spec's feedback is "post".
        """
        if self._spec.topology == "target_each":
            return hidden
        return output if self._spec.feedback == "pre" else self.norm(output)

    def token(self: Any, row: mx.array) -> mx.array:
        """Translate row indices of the head's LM head to the target's tokens.

        Index and token differ only for a reduced vocabulary, whose `d2t` holds the differences.
        """
        return row + mx.take(self.d2t, row) if "d2t" in self else row


class EagleHead(MTPHead):
    """An external drafter's head, which contains `block`, a Llama-like layer.

    Its attention reads [embedding, hidden] at full width, so its projections are widened.
    captured: width of each captured hidden state. vocab, draft_vocab: tokens of the target and of the LM head.
    window: number of last positions that the attention reads, None for all. residual_normed: the residual is
    `hidden_norm`'s output, not its input. parts: the optional modules present: "input_norm" (of all captured states),
    "fc_norm" (of each), "d2t".
    """

    NO_KV_BITS: str | None = None  # its attention supports quantized caches even if the target's does not

    def __init__(
        self,
        spec: MTPSpec,
        block: Any,
        parts: set[str],
        *,
        captured: int,
        vocab: int,
        draft_vocab: int,
        window: int | None,
        residual_normed: bool,
    ):
        nn.Module.__init__(self)  # inherits MTPHead's methods, not its modules
        self._spec, self._residual_normed, self.window = spec, residual_normed, window
        self.head_dim = block.self_attn.k_proj.weight.shape[0] // block.self_attn.n_kv_heads
        H, fused = block.input_layernorm.weight.size, len(spec.capture) * captured
        norm = partial(nn.RMSNorm, eps=block.input_layernorm.eps)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = block.self_attn[name]
            block.self_attn[name] = nn.Linear(2 * H, narrow.weight.shape[0], bias="bias" in narrow)
        self.block = block
        self.hidden_norm, self.norm = norm(H), norm(H)
        self.fc = nn.Linear(fused, H, bias=False)
        if "input_norm" in parts:
            self.input_norm = norm(fused)
        if "fc_norm" in parts:
            self.fc_norm = [norm(captured) for _ in spec.capture]
        if spec.embedding == "own":
            self.embed_tokens = nn.Embedding(vocab, H)
        if spec.head == "own":
            self.head = nn.Linear(H, draft_vocab, bias=False)
        if "d2t" in parts:
            self.d2t = mx.zeros((draft_vocab,), mx.int64)

    @property
    def attention(self) -> type:
        """The class of its attention, for kernels."""
        return type(self.block.self_attn)

    def fused(self: Any, captured: mx.array) -> mx.array:
        """Fuse the target's n hidden states, concatenated [B, L, n * captured], to [B, L, H]."""
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
