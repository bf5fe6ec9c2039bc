"""Step mlx-lm's Mamba2 over a `RecurrentCache`, which rolls back; the arithmetic is mlx-lm's.

Up to STEPPED_ROWS rows (every verify, replay and plain step) go one by one through mlx-lm's update of a single row,
so that after any verifies and rollbacks the state has the bits of the accepted rows read one at a time. (The
projections before it may round a row differently among others.) More rows, a prompt's, take mlx-lm's chunked form:
fewer passes over the state, equal up to rounding.
Sources: Mamba-2 (arXiv 2405.21060); mlx-lm's `ssm.py`.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.ssm import ssm_update

from .port import MAX_RECYCLED

STEPPED_ROWS = MAX_RECYCLED + 1  # the most rows of a verify


class Mamba2:
    """Mixin in front of mlx-lm's Mamba2 mixers, whose `__call__` it replaces where there is a cache."""

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """Mix rows x [n, S, H] with those before them in `cache`: [n, S, H]; `mask` is for attention and not used."""
        if cache is None:
            return super().__call__(x, None, cache)  # type: ignore[misc]
        (n, S), inner, grouped = x.shape[:2], self.intermediate_size, self.n_groups * self.ssm_state_size
        gate, rows, dt = mx.split(self.in_proj(x), [inner, inner + self.conv_dim], axis=-1)
        rows = cache.convolved(rows, self.conv_kernel_size)
        x, B, C = mx.split(nn.silu(self.conv1d(rows)), [inner, inner + grouped], axis=-1)
        x = x.reshape(n, S, self.num_heads, self.head_dim)
        B, C = (t.reshape(n, S, self.n_groups, self.ssm_state_size) for t in (B, C))
        state = cache.state(self._replay)
        before = mx.zeros((1, self.num_heads, self.head_dim, self.ssm_state_size)) if state is None else state
        y, after = self._stepped(before, x, B, C, dt) if S <= STEPPED_ROWS else self._update(state, x, B, C, dt)
        cache.advance(before, after, rows, (x, B, dt))
        return self.out_proj(self.norm(y.reshape(n, S, -1), gate))

    def _update(self: Any, state: mx.array | None, x: mx.array, B: mx.array, C: mx.array, dt: mx.array):
        """Compute the outputs [1, S, heads, D] of rows and the state after them [1, heads, D, N]."""
        D = self.D.astype(x.dtype)
        return ssm_update(x, self.A_log, B, C, D, dt, self.dt_bias, state, self.time_step_limit)

    def _stepped(self: Any, state: mx.array, *rows: mx.array, mask: mx.array | None = None):
        """Do as `_update`, row by row; rows outside `mask` [1, S] leave the state as it is."""
        outputs = []
        for t in range(rows[0].shape[1]):
            y, after = self._update(state, *(row[:, t : t + 1] for row in rows))
            state = after if mask is None else mx.where(mask[:, t, None, None, None], after, state)
            outputs.append(y)
        return mx.concatenate(outputs, axis=1), state

    def _replay(self: Any, state: mx.array, mask: mx.array, x: mx.array, B: mx.array, dt: mx.array) -> mx.array:
        """Compute the state after the masked rows of a tape; the output, which needs C, is not wanted."""
        return self._stepped(state, x, B, B, dt, mask=mask)[1]
