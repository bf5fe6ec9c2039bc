"""The gated delta rule over a cache that rolls back: mlx-lm's arithmetic, with `recurrent_cache` between the calls.

Source: Gated Delta Networks (arXiv 2412.06464); mlx-lm's `gated_delta.py`.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import gated_delta_update, normalize_qk


class GatedDelta:
    """Mixin in front of mlx-lm's gated-delta modules; they differ in how `inputs` projects."""

    def inputs(self: Any, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """x [B, S, H] -> qkv before the convolution [B, S, C], z [B, S, Hv, Dv], b and a [B, S, Hv]."""
        z = self.in_proj_z(x).reshape(*x.shape[:2], self.num_v_heads, self.head_v_dim)
        return self.in_proj_qkv(x), z, self.in_proj_b(x), self.in_proj_a(x)

    def __call__(self: Any, x: mx.array, mask: None = None, cache: Any = None) -> mx.array:
        """x [1, S, H] -> [1, S, H]."""
        if cache is None:
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        B, S, _ = x.shape
        qkv, z, b, a = self.inputs(x)
        rows = cache.convolved(qkv, self.conv_kernel_size)
        q, k, v = mx.split(nn.silu(self.conv1d(rows)), [self.key_dim, 2 * self.key_dim], axis=-1)
        q, k = (t.reshape(B, S, self.num_k_heads, self.head_k_dim) for t in (q, k))
        v = v.reshape(B, S, self.num_v_heads, self.head_v_dim)
        q, k = normalize_qk(q, k, inv_scale=self.head_k_dim**-0.5, eps=1e-6)
        before = cache.state(self._replay)
        y, after = gated_delta_update(q, k, v, a, b, self.A_log, self.dt_bias, before)
        cache.advance(mx.zeros_like(after) if before is None else before, after, rows, (k, v, a, b))
        return self.out_proj(self.norm(y, z).reshape(B, S, -1))

    def _replay(self: Any, state: mx.array, mask: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array):
        """The state after the masked rows of a tape; the output, which needs q, is not wanted."""
        return gated_delta_update(k, k, v, a, b, self.A_log, self.dt_bias, state, mask)[1]
