"""Attend a verify's rows to a cache in one pass over its keys and values, replacing mlx-lm's attention.

The kernel reads the cache's whole buffers. Its bits differ from MLX's, so plain decoding uses it as well.
"""

import copy
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from ..cache.layer_cache import CONTEXTS
from ..kernels import attention_served, attention_splits, padded, verify_attention, verify_attention_ref
from .kernel_site import VERIFY_ROWS, Site
from .norm_rope import AttentionForm, NormRope, Offset, device_offset, on_device, placed
from .three_axes import position_of


def cache_format(cache: Any) -> tuple[int, int] | None:
    """Return the (bits, group size) of a cache's keys and values; None if they are not quantized."""
    return (cache.bits, cache.group_size) if hasattr(cache, "bits") else None


def keys_and_values(parts: Sequence[mx.array]) -> tuple[Any, Any]:
    """Split a cache's buffers into keys and values: two arrays, or two triples of quantized arrays."""
    half = len(parts) // 2
    return (parts[0], parts[1]) if half == 1 else (tuple(parts[:half]), tuple(parts[half:]))


class CachedAttention(Site):
    """Base of attention sites: their kernel trials place rows of queries after a context of random keys and values.

    A subclass has `_read(x, offset, op)`, which returns the outputs of `op` for rows x at positions from `offset` on;
    `reference`, the reference op; and `_before(dtype)`, which creates the context and stores it in `tried`.
    """

    own_bits = True
    OFFSET, SLOTS = 2000, 2048  # first position of a trial's rows, and the size of its caches
    SHORTER, LONGER = 4, 10  # factors for trials of short and of long contexts
    _read: Callable[..., mx.array]
    _before: Callable[[mx.Dtype], Any]
    varies = True  # whether a short and a long context are tried, too
    reference: Callable[..., mx.array]

    def serves_rows(self, rows: int, cache: Any) -> bool:
        """Return whether the site is on for `rows` rows per sequence at the context of `cache`.

        For a pool: whether it is on at every context. A row of a tree has the kernel of its sequence's plain steps.
        """
        if getattr(cache, "of_tree", False):
            cache = cache.cache
        if hasattr(cache, "span"):  # a pool holds sequences of any length: on only if it is on at every length
            return all(rows in on for on in (self.rows, *self.rows_of_context.values()))
        return rows in self.rows_of_context.get(getattr(cache, "context", -1), self.rows)

    @cached_property
    def at_contexts(self) -> "dict[int, CachedAttention]":
        """Copies of the site for trials at a short and a long context, by the first and last of CONTEXTS.

        Empty unless `varies`.
        """
        if not self.varies:
            return {}
        shorter, longer = copy.copy(self), copy.copy(self)
        shorter.OFFSET = self.OFFSET // self.SHORTER
        longer.OFFSET, longer.SLOTS = self.OFFSET * self.LONGER, self.SLOTS * self.LONGER
        shorter.tried = longer.tried = None
        return {CONTEXTS[0]: shorter, CONTEXTS[-1]: longer}

    def computed(self, x: mx.array, split: bool) -> list[mx.array]:
        return [self._read(x, self.OFFSET)]

    def alone(self, x: mx.array) -> list[mx.array]:
        return [mx.concatenate([self._read(x[i : i + 1], self.OFFSET + i) for i in range(len(x))])]

    def truth(self, x: mx.array) -> list[mx.array]:
        self._before(x.dtype)
        x = x.astype(mx.float32)
        return [self._read(x, self.OFFSET, lambda *arrays, limit, **more: self.reference(*arrays, **more))]


class Attention(CachedAttention):
    """A module's attention of rotated queries, with its gate, on caches of one format.

    `quantized`: the sites of the quantized formats. `make_cache` creates a cache of the module's window and of this
    site's format. Its x are queries.
    """

    reference = staticmethod(verify_attention_ref)

    def __init__(self, module: Any, form: AttentionForm, make_cache: Callable[[], Any]):
        self.module, self.form, self.make_cache, cache = module, form, make_cache, make_cache()
        self.format, self.asked = cache_format(cache), not hasattr(cache, "bits")
        self.varies = self.asked and not cache.window
        self.op = "verify_attention" + ("" if self.asked else f" of {cache.bits}-bit caches")
        self.width = form.heads * form.head_dim
        window, sinks = f" window {cache.window}" if cache.window else "", "" if self.sinks is None else " sinks"
        self.shape = f"{form}{window}{sinks}"
        self.quantized: list[Attention] = []

    def of(self, cache: Any) -> "Attention | None":
        """Return the site of this cache's format and mark it as `asked`, so that it will be tried.

        None for a format without a site, and for a cache that keeps its first rows.
        """
        if getattr(cache, "keep", 0):  # mlx-lm's caches have no `keep`
            return None
        wanted = cache_format(cache)
        found = next((site for site in (self, *self.quantized) if site.format == wanted), None)
        if found:
            found.asked = True
        return found

    @property
    def sinks(self) -> mx.array | None:
        """The module's attention-sink logits [Hq]; None if it has none."""
        return self.module.get("attention_sink_bias")

    def serves(self, q: mx.array, cache: Any) -> bool:
        """Return whether the kernel supports the shapes and types of queries q and of the cache."""
        bits, group_size = self.format or (None, 64)
        return attention_served(q, *keys_and_values(cache.parts), group_size=group_size, bits=bits)

    def fused(
        self, q: mx.array, cache: Any, offset: Offset, gate: mx.array | None, op: Callable | None = None
    ) -> mx.array:
        """Attend queries [N, Hq, L, D] at positions from `offset` on to rows of `cache`: [N, L, Hq * Dv].

        A query reads the positions up to its own that are in the cache's window; they have been written. For several
        sequences offset is int32 [N], and the cache is a pool whose pass has N slots.
        gate: logits [N, L, Hq] or [N, L, Hq, Dv] that gate the output, or None. op: replaces the kernel.
        """
        op = partial(verify_attention, split=q.shape[2] in self.split) if op is None else op
        more: dict[str, Any] = {"limit": cache.limit, "window": cache.window, "start": cache.start}
        if hasattr(cache, "span"):
            more["cache_rows"] = cache.span.slots_array
            more["start"] = cache.start if isinstance(cache.start, int) else cache.start.flatten()
        if self.format is not None:
            more["bits"], more["group_size"] = self.format
        scale, stored = self.module.scale, keys_and_values(cache.parts)
        return op(q, *stored, on_device(offset), scale=scale, sinks=self.sinks, gate=gate, **more)

    def stock(self, x: mx.array) -> list[mx.array]:
        parts, masks = self._before(x.dtype)
        mask, q = masks[len(x)], self._queries(x)
        stored = keys_and_values([part[..., : mask.shape[-1], :] for part in parts])
        how = {"cache": self.make_cache(), "scale": self.module.scale, "mask": mask, "sinks": self.sinks}
        return [scaled_dot_product_attention(q, *stored, **how).swapaxes(1, 2).reshape(len(x), -1)]

    def splits(self, rows: int) -> bool:
        form = self.form
        return attention_splits(form.heads // form.kv_heads * padded(rows), form.value_dim)

    def computed(self, x: mx.array, split: bool) -> list[mx.array]:
        return [self._read(x, self.OFFSET, partial(verify_attention, split=split))]

    def _read(self, x: mx.array, offset: int, op: Callable | None = None) -> mx.array:
        parts = self._before(x.dtype)[0]
        cache = self._filled(parts if self.format else [part.astype(x.dtype) for part in parts], offset + len(x))
        return self.fused(self._queries(x), cache, offset, None, op)[0]

    def _queries(self, x: mx.array) -> mx.array:
        return x.reshape(1, len(x), self.form.heads, -1).swapaxes(1, 2)

    def _before(self, dtype: mx.Dtype) -> Any:
        """Return (a cache's parts with random keys and values, masks by row count), which the first call creates.

        dtype: of the parts at the first call, before they are quantized; ignored later.
        """
        if self.tried is None:
            cache = self.make_cache()
            slots = cache.ring.slots if cache.window else self.SLOTS
            parts = [
                mx.random.normal((1, self.form.kv_heads, slots, width), dtype, key=mx.random.key(seed))
                for seed, width in enumerate((self.form.head_dim, self.form.value_dim))
            ]
            if self.format is not None:
                bits, group_size = self.format
                parts = [stored for part in parts for stored in mx.quantize(part, group_size, bits)]
            masks = {}
            for rows in self.every_count:
                cache = self._filled(parts)
                cache.seek(device_offset(self.OFFSET), self.OFFSET)
                masks[rows] = cache.make_mask(rows)
            mx.eval(parts, masks)
            self.tried = parts, masks
        return self.tried

    def _filled(self, parts: list[mx.array], end: int = 0) -> Any:
        """Return a cache of these arrays at position OFFSET; its limit is at least `end` and a usual verify's end."""
        cache = self.make_cache()
        cache.parts = tuple(parts)
        cache.seek(device_offset(self.OFFSET), max(end, self.OFFSET + VERIFY_ROWS[-1]))
        return cache


class VerifyAttention:
    """Mixin for an attention with separate projections for queries, keys and values.

    It replaces `__call__` if the cache is this package's and a site is on: `placing` (norms and RoPE) or `attention`
    (from there to the gated output).
    """

    attention: Attention
    placing: NormRope | None

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        (n, rows, _), form, placing, site = x.shape, self.attention.form, self.placing, self.attention.of(cache)
        site = site if site and site.serves_rows(rows, cache) else None
        pooled, alone = hasattr(cache, "span"), n == 1 and hasattr(cache, "parts")
        placing = placing if placing and rows in placing.rows else None
        if not (pooled or alone) or not (site or placing):  # no cache, or one of mlx-lm's
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        # Explicit widths make projections that were sharded after the load an error.
        q = self["q_proj"](x).reshape(n, rows, form.heads, form.query_dim)
        k = self["k_proj"](x).reshape(n, rows, form.kv_heads, form.head_dim)
        v = self["v_proj"](x).reshape(n, rows, form.kv_heads, form.value_dim)
        gate = None if form.gate is None else self["g_proj"](x) if form.gate == "head" else q[..., form.head_dim :]
        offset, position = cache.offset, position_of(self, cache)
        if placing and cache.axes is None:
            q, k = placing.fused(q, k, position)
        else:
            q, k = placed(self, q, k, position, form.head_dim)
        if form.value_scale is not None:
            v = v * form.value_scale
        views = cache.update_and_fetch(k, v.swapaxes(1, 2))
        if site and site.serves(q, cache):
            return self["o_proj"](site.fused(q, cache, offset, gate))
        how = {"cache": cache, "scale": self.scale, "mask": mask, "sinks": self.attention.sinks}
        out = scaled_dot_product_attention(q, *views, **how).swapaxes(1, 2)
        if gate is not None:
            out = out * mx.sigmoid(gate).reshape(n, rows, form.heads, -1)
        return self["o_proj"](out.reshape(n, rows, -1))
