"""Run mlx-lm's Mamba2 on a `RecurrentCache`, which can roll back; the arithmetic is mlx-lm's.

Up to STEPPED_ROWS rows (every verify, replay and plain step) use mlx-lm's one-row update in sequence, or one launch
of a kernel with the same bits. So after any verifies and rollbacks the state equals that of the accepted rows
processed one at a time. (The projections before it may round a row differently in a batch.) More rows, as in a
prefill, use mlx-lm's chunked form, which makes fewer passes over the state and is equal up to rounding.
Sources: Mamba-2 (arXiv 2405.21060); mlx-lm's `ssm.py`.
"""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.ssm import compute_dt, ssm_update

from ..kernels import mamba2_verify
from .gated_delta import Recurrence
from .with_heads import MAX_RECYCLED

STEPPED_ROWS = MAX_RECYCLED + 1  # maximum rows of a verify


class Mamba2:
    """Mixin for mlx-lm's Mamba2 mixers that replaces `__call__` if there is a cache.

    verify_rows: row counts at which a kernel (`fused`) replaces mlx-lm's functions (`plain`) for the recurrence.
    A tape holds x, B and dt (before its softplus) of its rows.
    """

    verify_rows: frozenset[int] = frozenset()

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """Mix rows x [n, S, H] with the earlier rows in `cache`, and advance it: [n, S, H].

        Without a cache mlx-lm's module runs. `mask` is for attention and unused.
        """
        if cache is None:
            return super().__call__(x, None, cache)  # type: ignore[misc]
        (n, S), inner = x.shape[:2], self.intermediate_size
        gate, rows, dt = mx.split(self.in_proj(x), [inner, inner + self.conv_dim], axis=-1)
        rows = cache.convolved(rows, self.conv_kernel_size)
        path = self.fused if n == 1 and S in self.verify_rows else self.plain
        y = path(nn.silu(self.conv1d(rows)), dt, cache, rows)
        return self.out_proj(self.norm(y.reshape(n, S, -1), gate))

    def plain(self: Any, mixed: mx.array, dt: mx.array, cache: Any, rows: mx.array) -> mx.array:
        """Return the recurrence's output [n, S, heads, D] by mlx-lm's arithmetic, and advance the cache.

        mixed: x, B and C after the convolution, concatenated [n, S, C]; rows: before it, as from `cache.convolved`.
        """
        (x, B, C), S = self._parts(mixed), mixed.shape[1]
        state = cache.state(self._replay, (x, B, dt))
        before = self._empty() if state is None else state
        y, after = self._stepped(before, x, B, C, dt) if S <= STEPPED_ROWS else self._update(state, x, B, C, dt)
        cache.advance(before, after, rows, (x, B, dt))
        return y

    def fused(self: Any, mixed: mx.array, dt: mx.array, cache: Any, rows: mx.array) -> mx.array:
        """Return the output of `plain` for one sequence, in one launch that also replays the tape, if there is one.

        Before it the softplus of each dt, of the rows and of the tape, is a launch.
        """
        (x, B, C), accepted, tape = self._parts(mixed), cache.accepted, None
        if accepted is not None:
            old_x, old_B, old_dt = cache.tape
            tape = old_x, old_B, compute_dt(old_dt, self.dt_bias, self.time_step_limit)
        state = self._empty() if cache.committed is None else cache.committed
        new, D = (x, B, compute_dt(dt, self.dt_bias, self.time_step_limit)), self.D.astype(x.dtype)
        y, state = mamba2_verify(C, new, state, self.A_log, D, tape=tape, accepted=accepted, last=cache.final)
        cache.advance(state, state, rows, (x, B, dt))  # the kernel returned the state that the cache needs
        return y

    def _parts(self: Any, mixed: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Split the convolution's output [n, S, C] into x [n, S, heads, D], and B and C [n, S, groups, N]."""
        inner, grouped = self.intermediate_size, self.n_groups * self.ssm_state_size
        x, B, C = mx.split(mixed, [inner, inner + grouped], axis=-1)
        groups = *mixed.shape[:2], self.n_groups, self.ssm_state_size
        return x.reshape(*mixed.shape[:2], self.num_heads, self.head_dim), B.reshape(groups), C.reshape(groups)

    def _empty(self: Any) -> mx.array:
        return mx.zeros((1, self.num_heads, self.head_dim, self.ssm_state_size))

    def _update(self: Any, state: mx.array | None, x: mx.array, B: mx.array, C: mx.array, dt: mx.array):
        """Compute the outputs [n, S, heads, D] of rows and the state after them [n, heads, D, N].

        state: before the rows, None at the start. dt: before its softplus.
        """
        D = self.D.astype(x.dtype)
        return ssm_update(x, self.A_log, B, C, D, dt, self.dt_bias, state, self.time_step_limit)

    def _stepped(self: Any, state: mx.array, *rows: mx.array, mask: mx.array | None = None):
        """Return the result of `_update`, row by row; rows outside `mask` [n, S] leave the state unchanged."""
        outputs = []
        for t in range(rows[0].shape[1]):
            y, after = self._update(state, *(row[:, t : t + 1] for row in rows))
            state = after if mask is None else mx.where(mask[:, t, None, None, None], after, state)
            outputs.append(y)
        return mx.concatenate(outputs, axis=1), state

    def _replay(self: Any, state: mx.array, mask: mx.array, x: mx.array, B: mx.array, dt: mx.array) -> mx.array:
        """Return the state after the rows of a tape for which `mask` [n, S] is True; `state` is that before them.

        x, B, dt: the tape, with dt before its softplus. Outputs, which would need C, are not computed.
        """
        return self._stepped(state, x, B, B, dt, mask=mask)[1]


class Scan(Recurrence):
    """The recurrence of a Mamba2 layer; its x are rows after the convolution and dt, concatenated."""

    op = "mamba2_verify"
    stock_exact = True

    def __init__(self, layer: Any, make_cache: Callable[[], Any]):
        self.layer, self.make_cache = layer, make_cache
        self.width = layer.conv_dim + layer.num_heads
        self.shape = f"{layer.num_heads}x{layer.head_dim} {layer.n_groups}x{layer.ssm_state_size}"
        self.before: list[Any] = []

    def _read(self, path: Callable[..., mx.array], x: mx.array, cache: Any) -> mx.array:
        """Run rows x [M, width] through a path of the layer: [M, heads * D]."""
        mixed, dt = mx.split(x[None], [self.layer.conv_dim], axis=-1)
        unread = mx.zeros((1, self.layer.conv_kernel_size - 1 + len(x), 1))  # the trial has no convolution
        return path(mixed, dt, cache, unread).reshape(len(x), -1)
