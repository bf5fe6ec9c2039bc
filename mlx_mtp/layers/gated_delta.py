"""Run mlx-lm's gated-delta layers on a `RecurrentCache`, which can roll back; the arithmetic is mlx-lm's.

Source: Gated Delta Networks (arXiv 2412.06464); mlx-lm's `gated_delta.py`.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.gated_delta import compute_g, gated_delta_kernel

from ..kernels import Gates, delta_inputs, gated_delta_verify, gated_norm, on_metal
from .kernel_site import Site

KEPT = 4  # maximum rows of a verify for which every intermediate state is kept; each is as large as the state


class GatedDelta:
    """Mixin for mlx-lm's gated-delta modules that replaces `__call__` if there is a cache.

    A port whose module projects differently overrides `inputs` and, if needed, `grouped`.
    verify_rows: row counts at which kernels (`fused`) replace mlx-lm's functions (`plain`) between the projections.
    A tape is either the arrays k, v, a, b, g and beta of its rows (g and beta are the gates, computed from a and b),
    or one array, the state after each row. `fused` and `plain` both read tapes of either kind.
    Most submodules are read by key, because an attribute lookup costs 0.4 us more.
    Shapes: C channels of the convolution, Hk and Hv key and value heads, of Dk and Dv values.
    """

    verify_rows: frozenset[int] = frozenset()

    def inputs(self: Any, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Project x [B, S, H] to qkv before the convolution [B, S, C], z [B, S, Hv, Dv], b and a [B, S, Hv]."""
        z = self["in_proj_z"](x).reshape(*x.shape[:2], self.num_v_heads, self.head_v_dim)
        return self["in_proj_qkv"](x), z, self["in_proj_b"](x), self["in_proj_a"](x)

    def grouped(self: Any, x: mx.array) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Return the arrays of `inputs` for `fused`: as they are, or as views [B, S, groups, ..] of grouped heads."""
        return self.inputs(x)

    def __call__(self: Any, x: mx.array, mask: None = None, cache: Any = None) -> mx.array:
        """Mix rows x [B, S, H] of B sequences with the earlier rows in `cache`, and advance it: [B, S, H].

        `mask` is ignored, except without a cache, where mlx-lm's own module runs.
        """
        if cache is None:
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        B, S, _ = x.shape
        fuses = S in self.verify_rows and not cache.of_tree
        y = self.fused(*self.grouped(x), cache) if fuses else self.plain(*self.inputs(x), cache)
        return self["out_proj"](y.reshape(B, S, -1))

    def plain(self: Any, qkv: mx.array, z: mx.array, b: mx.array, a: mx.array, cache: Any) -> mx.array:
        """Return the recurrence's output [B, S, Hv, Dv] for `inputs`, normed and gated, and advance the cache.

        The arithmetic is that of mlx-lm's functions.
        """
        rows = cache.convolved(qkv, self.conv_kernel_size)
        qk, v = mx.split(nn.silu(self["conv1d"](rows)), [2 * self.key_dim], axis=-1)
        q, k = self._normed(qk.reshape(*qk.shape[:2], 2 * self.num_k_heads, self.head_k_dim))
        v = v.reshape(*v.shape[:2], self.num_v_heads, self.head_v_dim)
        g, beta = self._gates(a, b)
        tape = k, v, a, b, g, beta
        before = cache.state(self._replay, tape)
        y, after, each = self._update(q, k, v, g, beta, before)
        if each is not None and not cache.final:
            tape = (each.reshape(*each.shape[:2], *after.shape[1:]),)
        cache.advance(mx.zeros_like(after) if before is None else before, after, rows, tape)
        return self["norm"](y, z)

    def fused(self: Any, qkv: mx.array, z: mx.array, b: mx.array, a: mx.array, cache: Any) -> mx.array:
        """Return the output of `plain` for the arrays of `grouped`, in three launches, and advance the cache.

        The second launch also replays a tape of inputs; MLX's operations read a tape of states before. The rows of B
        sequences follow each other: [1, B * S, Hv, Dv].
        """
        accepted, tape = cache.accepted, None
        earlier = cache.convolution_rows(qkv.flatten(2), self.conv_kernel_size)  # uses only the shape of qkv
        heads = {"key_heads": self.num_k_heads, "head_dim": self.head_k_dim}
        layer = Gates(a, b, self.A_log, self.dt_bias)
        q, k, v, g, beta, rows = delta_inputs(qkv, earlier, self.conv1d.weight, layer, **heads, accepted=accepted)
        v = v.reshape(*v.shape[:2], self.num_v_heads, self.head_v_dim)
        if cache.replays:
            old_k, old_v, old_a, old_b, *old_gates = cache.tape
            old_g, old_beta = old_gates or self._gates(old_a, old_b)
            tape, state = (old_k, old_v, old_g, old_beta), cache.committed
        else:
            accepted, state = None, cache.state(self._replay)
        if state is None:
            state = mx.zeros((1, self.num_v_heads, self.head_v_dim, self.head_k_dim))
        y, state = gated_delta_verify(q, (k, v, g, beta), state, tape=tape, accepted=accepted, last=cache.final)
        kept = k, v, a.flatten(2), b.flatten(2), g, beta
        cache.advance(state, state, rows, kept)  # the kernel returned the state that the cache needs
        y, z = (each.reshape(1, -1, *each.shape[2:]) for each in (y, z))  # concatenate the sequences' rows
        return gated_norm(y, z, self.norm.weight, self.norm.eps)

    def _normed(self: Any, qk: mx.array) -> list[mx.array]:
        """Norm and scale q and k, side by side [B, S, 2 Hk, Dk], as mlx-lm's `normalize_qk`: [B, S, Hk, Dk] each."""
        scale = self.head_k_dim**-0.5
        q, k = mx.split(mx.fast.rms_norm(qk, None, 1e-6 * scale**2), 2, axis=2)
        return [q * scale**2, k * scale]

    def _gates(self: Any, a: mx.array, b: mx.array) -> tuple[mx.array, mx.array]:
        """Return the decay g and the rate beta, [B, S, Hv], for a and b from `inputs`."""
        return compute_g(self["A_log"], a, self["dt_bias"]), mx.sigmoid(b)

    def _replay(
        self: Any, state: mx.array, mask: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, *gates
    ):
        """Return the state after those rows of a tape that `mask` keeps; there is no output, because it needs q."""
        return self._update(None, k, v, *(gates or self._gates(a, b)), state, mask)[1]

    def _update(
        self: Any, q: Any, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: Any, mask: Any = None
    ):
        """Return (outputs, state, states per row) of mlx-lm's recurrence, as `row_by_row` does.

        On Metal mlx-lm's kernel runs if Dk is a multiple of 32; then states per row are None. Without q the outputs
        are unusable: None, or the kernel's with k as q.
        """
        if state is None:
            state = mx.zeros((1, self.num_v_heads, self.head_v_dim, self.head_k_dim))
        if on_metal() and self.head_k_dim % 32 == 0:
            return *gated_delta_kernel(k if q is None else q, k, v, g, beta, state, mask), None
        return row_by_row(q, k, v, g, beta, state, mask)


def row_by_row(q: Any, k: mx.array, v: mx.array, g: mx.array, beta: mx.array, state: Any, mask: Any = None):
    """Compute mlx-lm's `gated_delta_ops`, bit for bit, with a third of its calls; without q there are no outputs.

    Returns outputs [B, S, Hv, Dv], the state [B, Hv, Dv, Dk] after the rows that `mask` keeps (None: all), and, if
    S <= KEPT, the state after each row, masked or not, [B, S, Hk, Hv / Hk, Dv, Dk], else None.
    q, k [B, S, Hk, Dk], v [B, S, Hv, Dv], g [B, S, Hv] or [B, S, Hv, Dk], beta [B, S, Hv], mask [B, S];
    state [B, Hv, Dv, Dk], None at the start.
    """
    (B, S, Hk, Dk), (Hv, Dv) = k.shape, v.shape[2:]
    groups = B, S, Hk, Hv // Hk  # value heads grouped by the key head that they share
    whole, column = (*groups, Dv, Dk), (*groups, Dv, 1)
    one = (B, 1, *whole[2:])
    state = mx.zeros(one) if state is None else state.reshape(one)
    # Broadcast all rows at once; otherwise MLX broadcasts in every operation on each row.
    stacks = [
        mx.broadcast_to(k.reshape(B, S, Hk, 1, 1, Dk), whole),
        v.reshape(column),
        mx.broadcast_to(g.reshape(*groups, 1, -1), whole),
        mx.broadcast_to(beta.reshape(*groups, 1, 1), column),
    ]
    counts = [None] * S
    if mask is not None:
        counts = mx.split(mx.broadcast_to(mask.reshape(B, S, 1, 1, 1, 1), whole), S, axis=1)
    states = []
    for key, value, decay, rate, count in zip(*[mx.split(stack, S, axis=1) for stack in stacks], counts, strict=True):
        decayed = state * decay
        delta = (value - (decayed * key).sum(-1, keepdims=True)) * rate
        states.append(decayed + key * delta)
        state = states[-1] if count is None else mx.where(count, states[-1], state)
    each = mx.concatenate(states, axis=1) if S <= KEPT else None
    y = None
    if q is not None:
        y = _queried(q.reshape(B, S, Hk, 1, 1, Dk), states, each).reshape(B, S, Hv, Dv).astype(q.dtype)
    return y, state.reshape(B, Hv, Dv, Dk), each


def _queried(q: mx.array, states: list[mx.array], each: mx.array | None) -> mx.array:
    """Multiply the state after each row by the row's query: [B, S, Hk, Hv / Hk, Dv]."""
    if each is not None:
        return (each * q).sum(-1)
    queries = mx.split(mx.broadcast_to(q, (*q.shape[:3], *states[0].shape[3:])), len(states), axis=1)
    return mx.concatenate([(state * query).sum(-1) for state, query in zip(states, queries, strict=True)], axis=1)


class Recurrence(Site):
    """All work of a gated-delta layer between its projections: convolution, norms, gates and recurrence.

    Each row depends on earlier rows: `alone` runs mlx-lm's one-row steps in sequence.
    `make_cache` creates a layer's empty cache.
    """

    op = "gated_delta_verify"
    PROMPT, TAPE, ACCEPTED = 5, 4, 2  # numbers of rows before those of a trial

    def __init__(self, layer: Any, make_cache: Callable[[], Any]):
        self.layer, self.make_cache = layer, make_cache
        self.ends = list(itertools.accumulate((layer.conv_dim, layer.value_dim, layer.num_v_heads)))
        self.width = self.ends[-1] + layer.num_v_heads
        heads = f"{layer.num_k_heads}x{layer.head_k_dim} {layer.num_v_heads}x{layer.head_v_dim}"
        self.shape = f"{heads} taps {layer.conv_kernel_size}"
        self.before: list[Any] = []

    @property
    def rows(self) -> frozenset[int]:
        return self.layer.verify_rows

    @rows.setter
    def rows(self, rows: frozenset[int]) -> None:
        self.layer.verify_rows, self.before = rows, []

    def ours(self, x: mx.array) -> list[mx.array]:
        return [self._read(self.layer.fused, x, self._cache(x, tape=True))]

    def stock(self, x: mx.array) -> list[mx.array]:
        return [self._read(self.layer.plain, x, self._cache(x, tape=True))]

    def alone(self, x: mx.array) -> list[mx.array]:
        cache = self._cache(x, tape=False)
        return [mx.concatenate([self._read(self.layer.plain, x[i : i + 1], cache) for i in range(len(x))])]

    def _read(self, path: Callable[..., mx.array], x: mx.array, cache: Any) -> mx.array:
        """Run rows x [M, width] through a path of the layer: [M, Hv * Dv]."""
        qkv, z, b, a = mx.split(x[None], self.ends, axis=-1)
        z = z.reshape(1, len(x), self.layer.num_v_heads, self.layer.head_v_dim)
        return path(qkv, z, b, a, cache).reshape(len(x), -1)

    def _cache(self, x: mx.array, *, tape: bool) -> Any:
        """Return a copy of a cache that holds PROMPT + ACCEPTED rows.

        With `tape` they are a prompt and a tape of TAPE rows, of which ACCEPTED are accepted; else they were added
        one at a time.
        """
        if not self.before:
            rows = mx.random.normal((self.PROMPT + self.TAPE, self.width), x.dtype, key=mx.random.key(0))
            end = self.PROMPT + self.ACCEPTED
            single, verified = self.make_cache(), self.make_cache()
            for i in range(end):
                self._read(self.layer.plain, rows[i : i + 1], single)
            self._read(self.layer.plain, rows[: self.PROMPT], verified)
            verified.seek(mx.array([self.PROMPT]), self.PROMPT)
            self._read(self.layer.plain, rows[self.PROMPT :], verified)
            verified.seek(mx.array([end]), end + self.TAPE - self.ACCEPTED)
            self.before = [single, verified]
            mx.eval(single.parts, verified.parts)
        return copy.copy(self.before[tape])
