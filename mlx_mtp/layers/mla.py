"""Multi-head latent attention that stays absorbed for a few rows.

mlx-lm absorbs the key and value projections into query and output for one row only, and for two or more expands the
whole latent cache to full heads. Here up to ABSORBED_ROWS rows are absorbed: a verify reads the latent cache once.
Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from typing import Any

import mlx.core as mx

ABSORBED_ROWS = 8


class AbsorbedMLA:
    """Mixin in front of mlx-lm's MLA attention modules (DeepSeek-V3, GLM-4.7-Flash)."""

    def __call__(self: Any, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        """x [B, L, H] -> [B, L, H]; `mask` is None or boolean [L, S]."""
        B, L, _ = x.shape
        if cache is None or L > ABSORBED_ROWS:
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        q = self.q_proj(x) if self.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.reshape(B, L, self.num_heads, self.q_head_dim).transpose(0, 2, 1, 3)
        q_nope, q_pe = mx.split(q, [self.qk_nope_head_dim], axis=-1)
        latent, k_pe = mx.split(self.kv_a_proj_with_mqa(x), [self.kv_lora_rank], axis=-1)
        k_pe = self.rope(k_pe[:, None], cache.offset)  # [B, 1, L, rope]
        q_pe = self.rope(q_pe, cache.offset)
        latent, k_pe = cache.update_and_fetch(self.kv_a_layernorm(latent)[:, None], k_pe)
        out = self.attend(q_nope, q_pe, latent, k_pe, mask)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(B, L, -1))

    def attend(
        self: Any, q_nope: mx.array, q_pe: mx.array, latent: mx.array, k_pe: mx.array, mask: mx.array | None
    ) -> mx.array:
        """q [B, heads, L, ..] on the cached rows [B, 1, S, ..] -> [B, heads, L, v].

        All heads share the cache, so they fold into the rows of one product, which reads it once and not per head.
        """
        B, heads, L, _ = q_nope.shape
        folded = (B, 1, heads * L, -1)
        scores = (q_pe * self.scale).reshape(folded) @ k_pe.swapaxes(-1, -2)
        if mask is not None:
            scores = scores.reshape(B, heads, L, -1)
            scores = mx.where(mask, scores, mx.finfo(scores.dtype).min).reshape(folded)
        q = self.embed_q(q_nope).reshape(folded)
        out = mx.fast.scaled_dot_product_attention(q, latent, latent, scale=self.scale, mask=scores)
        return self.unembed_out(out.reshape(B, heads, L, -1))
