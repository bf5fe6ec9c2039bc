"""The gated delta rule over a cache that rolls back: mlx-lm's arithmetic, with `recurrent_cache` between the calls.

Source: Gated Delta Networks (arXiv 2412.06464); mlx-lm's `gated_delta.py`.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g, gated_delta_update, normalize_qk

from ..kernels import Gates, delta_inputs, gated_delta_verify, gated_norm


class GatedDelta:
    """Mixin in front of mlx-lm's gated-delta modules; they differ in how `inputs` projects.

    verify_rows: the row counts at which what lies between the projections is three launches, with the replay in one.
        A tape is k, v, a, b of its rows, followed by the gates g and beta where kernels wrote it; either can follow
        the other.
    """

    verify_rows: frozenset[int] = frozenset()

    def inputs(self: Any, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """x [B, S, H] -> qkv before the convolution [B, S, C], z [B, S, Hv, Dv], b and a [B, S, Hv]."""
        z = self.in_proj_z(x).reshape(*x.shape[:2], self.num_v_heads, self.head_v_dim)
        return self.in_proj_qkv(x), z, self.in_proj_b(x), self.in_proj_a(x)

    def grouped(self: Any, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """`inputs`, or views of the products [B, S, G, ..] where these have the heads in groups."""
        return self.inputs(x)

    def __call__(self: Any, x: mx.array, mask: None = None, cache: Any = None) -> mx.array:
        """x [1, S, H] -> [1, S, H]."""
        if cache is None:
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        B, S, _ = x.shape
        y = self.fused(*self.grouped(x), cache) if S in self.verify_rows else self.plain(*self.inputs(x), cache)
        return self.out_proj(y.reshape(B, S, -1))

    def plain(self: Any, qkv: mx.array, z: mx.array, b: mx.array, a: mx.array, cache: Any) -> mx.array:
        """The gated output of the recurrence [1, S, Hv, Dv], by mlx-lm's functions."""
        rows = cache.convolved(qkv, self.conv_kernel_size)
        q, k, v = mx.split(nn.silu(self.conv1d(rows)), [self.key_dim, 2 * self.key_dim], axis=-1)
        q, k = (t.reshape(*t.shape[:2], self.num_k_heads, self.head_k_dim) for t in (q, k))
        q, k = normalize_qk(q, k, inv_scale=self.head_k_dim**-0.5, eps=1e-6)
        v = v.reshape(*v.shape[:2], self.num_v_heads, self.head_v_dim)
        before = cache.state(self._replay)
        y, after = gated_delta_update(q, k, v, a, b, self.A_log, self.dt_bias, before)
        cache.advance(mx.zeros_like(after) if before is None else before, after, rows, (k, v, a, b))
        return self.norm(y, z)

    def fused(self: Any, qkv: mx.array, z: mx.array, b: mx.array, a: mx.array, cache: Any) -> mx.array:
        """`plain` in three launches; that of the recurrence reads the tape's accepted rows again, and then the new.

        Takes the inputs as they are or `grouped`.
        """
        accepted, tape = cache.accepted, None
        behind = cache.behind(qkv.flatten(2), self.conv_kernel_size)  # its shape is read, and no more
        heads = {"key_heads": self.num_k_heads, "head_dim": self.head_k_dim}
        layer = Gates(a, b, self.A_log, self.dt_bias)
        q, k, v, g, beta, rows = delta_inputs(qkv, behind, self.conv1d.weight, layer, **heads, accepted=accepted)
        v = v.reshape(*v.shape[:2], self.num_v_heads, self.head_v_dim)
        if accepted is not None:
            old_k, old_v, old_a, old_b, *old_gates = cache.tape
            tape = (old_k, old_v, *(old_gates or self._gates(old_a, old_b)))
        state = cache.committed
        if state is None:
            state = mx.zeros((1, self.num_v_heads, self.head_v_dim, self.head_k_dim))
        y, state = gated_delta_verify(q, (k, v, g, beta), state, tape=tape, accepted=accepted, last=cache.final)
        kept = k, v, a.flatten(2), b.flatten(2), g, beta
        cache.advance(state, state, rows, kept)  # the one of the two states that it keeps
        return gated_norm(y, z, self.norm.weight, self.norm.eps)

    def _gates(self: Any, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
        """g [1, S, Hv] float32 and beta [1, S, Hv]."""
        return compute_g(self.A_log, a, self.dt_bias), mx.sigmoid(b)

    def _replay(self: Any, state: mx.array, mask: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, *_):
        """The state after the masked rows of a tape; the output, which needs q, is not wanted."""
        return gated_delta_update(k, k, v, a, b, self.A_log, self.dt_bias, state, mask)[1]
