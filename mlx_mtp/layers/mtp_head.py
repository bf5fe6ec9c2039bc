"""Run one MTP module ("nextn layer"): fuse embedding and hidden state, run one decoder block, norm.

Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 2.2; tensor names as in its checkpoints.
"""

from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .mtp_spec import MTPSpec


class MTPHead(nn.Module):
    """An MTP head around `block`, a decoder layer of the family.

    `final` is the target's last norm: the head's are like it. `mask_array`: the block wants its mask as an array.
    A port sets `window`, the positions that the block's attention sees, where these are not all.
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

    def __call__(self, embeddings: mx.array, hidden: mx.array, cache: Any) -> mx.array:
        """Map the next tokens' embeddings and hidden states [B, L, H] to outputs [B, L, H], before the norm."""
        e, h = self.enorm(embeddings), self.hnorm(hidden)
        pair = [e, h] if self._spec.fuse == "eh" else [h, e]
        x = self.eh_proj(mx.concatenate(pair, axis=-1))
        return self.block(x, cache.make_mask(x.shape[1], return_array=self._mask_array), cache)

    def feedback(self, output: mx.array, hidden: mx.array) -> mx.array:
        """Choose what the next draft reads, after this head read `hidden` and gave `output`; all are [B, L, H]."""
        if self._spec.topology == "target_each":
            return hidden
        return output if self._spec.feedback == "pre" else self.norm(output)

    def token(self: Any, row: mx.array) -> mx.array:
        """Translate rows of the head's LM head to the target's tokens.

        They differ in an LM head of a reduced vocabulary, whose `d2t` holds the differences.
        """
        return row + mx.take(self.d2t, row) if "d2t" in self else row
