"""Attend a verify's rows to a cache in one pass over its keys and values, in the place of mlx-lm's modules.

The kernel reads the cache's whole buffers. Its rows have bits of their own, so plain decoding uses it as well.
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
from .norm_rope import Form, NormRope, Offset, device_offset, on_device, placed


def cache_format(cache: Any) -> tuple[int, int] | None:
    """Read off a cache the (bits, group size) of its keys and values; None where they are not quantized."""
    return (cache.bits, cache.group_size) if hasattr(cache, "bits") else None


def keys_and_values(parts: Sequence[mx.array]) -> tuple[Any, Any]:
    """Pair up a cache's buffers: two arrays, or two triples of quantized ones."""
    half = len(parts) // 2
    return (parts[0], parts[1]) if half == 1 else (tuple(parts[:half]), tuple(parts[half:]))


class CachedAttention(Site):
    """Base of the sites that attend to a cache: their kernel trials, whose rows of queries come behind random ones.

    A subclass has `_read(x, offset, op)`, the outputs of `op` for rows x at positions from `offset` on;
    `reference`, the op that is true; and `_before(dtype)`, which makes what these read and keeps it in `tried`.
    """

    own_bits = True
    OFFSET, SLOTS = 2000, 2048  # where the rows of a trial are, in caches of what size
    SHORTER, LONGER = 4, 10  # by how much, in trials of short contexts and of long ones
    _read: Callable[..., mx.array]
    _before: Callable[[mx.Dtype], Any]
    varies = True  # whether a context may be as long as the text
    reference: Callable[..., mx.array]

    def serves_rows(self, rows: int, cache: Any) -> bool:
        """Say whether it is on for so many rows of the text, or of each of the texts, that a cache holds."""
        if hasattr(cache, "span"):  # texts of any lengths: as each would have it alone
            return all(rows in on for on in (self.rows, *self.rows_of_context.values()))
        return rows in self.rows_of_context.get(getattr(cache, "context", -1), self.rows)

    @cached_property
    def at_contexts(self) -> "dict[int, CachedAttention]":
        """Copy it for trials of short and long contexts; none where no length makes a difference."""
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
        return [self._read(x.astype(mx.float32), self.OFFSET, self._in_float32)]

    def _in_float32(self, *arrays: mx.array, limit: int, **more: Any) -> mx.array:
        return self.reference(*arrays, **more)


class Attention(CachedAttention):
    """The attention behind its projections, over a cache of one format; `quantized` has those of other formats.

    `make_cache` makes a cache of the module's window and of that format. Its x are queries.
    """

    reference = staticmethod(verify_attention_ref)

    def __init__(self, module: Any, form: Form, make_cache: Callable[[], Any]):
        self.module, self.form, self.make_cache, cache = module, form, make_cache, make_cache()
        self.format, self.asked = cache_format(cache), not hasattr(cache, "bits")
        self.varies = self.asked and not cache.window
        self.op = "verify_attention" + ("" if self.asked else f" of {cache.bits}-bit caches")
        self.width = form.heads * form.head_dim
        window, sinks = f" window {cache.window}" if cache.window else "", "" if self.sinks is None else " sinks"
        self.shape = f"{form}{window}{sinks}"
        self.quantized: list[Attention] = []

    def of(self, cache: Any) -> "Attention | None":
        """Find the site that reads this cache; None where none knows its format, or it keeps its first positions."""
        if getattr(cache, "keep", 0):  # mlx-lm's own have none
            return None
        wanted = cache_format(cache)
        found = next((site for site in (self, *self.quantized) if site.format == wanted), None)
        if found:
            found.asked = True
        return found

    @property
    def sinks(self) -> mx.array | None:
        """Logits [Hq] of attention to nothing."""
        return self.module.get("attention_sink_bias")

    def serves(self, q: mx.array, cache: Any) -> bool:
        """Say whether the kernel takes the form of what the cache holds."""
        bits, group_size = self.format or (None, 64)
        return attention_served(q, *keys_and_values(cache.parts), group_size=group_size, bits=bits)

    def fused(
        self, q: mx.array, cache: Any, offset: Offset, gate: mx.array | None, op: Callable | None = None
    ) -> mx.array:
        """Attend queries [N, Hq, L, D] at positions from `offset` on to all that `cache` holds: [N, L, Hq * Dv].

        Of N texts offset is int32 [N], and the cache has a slot for each.
        gate: logits [N, L, Hq] or [N, L, Hq, Dv] of factors of the values, None for none. op: in the kernel's place.
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
        cache = self._filled(parts if self.format else [part.astype(x.dtype) for part in parts])
        return self.fused(self._queries(x), cache, offset, None, op)[0]

    def _queries(self, x: mx.array) -> mx.array:
        return x.reshape(1, len(x), self.form.heads, -1).swapaxes(1, 2)

    def _before(self, dtype: mx.Dtype) -> Any:
        """Make random keys and values wherever a row of the trial may look, and each number of rows' mask."""
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
            for rows in self.candidates:
                cache = self._filled(parts)
                cache.seek(device_offset(self.OFFSET), self.OFFSET)
                masks[rows] = cache.make_mask(rows)
            mx.eval(parts, masks)
            self.tried = parts, masks
        return self.tried

    def _filled(self, parts: list[mx.array]) -> Any:
        cache = self.make_cache()
        cache.parts = tuple(parts)
        cache.seek(device_offset(self.OFFSET), self.OFFSET + VERIFY_ROWS[-1])
        return cache


class VerifyAttention:
    """Mixin in front of an attention with one projection each for queries, keys and values.

    It replaces `__call__` where either site is on: `placing`, norms and RoPE, and `attention`, what is behind them.
    """

    attention: Attention
    placing: NormRope | None

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        (texts, rows, _), form, placing, site = x.shape, self.attention.form, self.placing, self.attention.of(cache)
        site = site if site and site.serves_rows(rows, cache) else None
        pooled, alone = hasattr(cache, "span"), texts == 1 and hasattr(cache, "parts")
        placing = placing if placing and rows in placing.rows else None
        if not (pooled or alone) or not (site or placing):  # without a cache, or with one of mlx-lm's
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        # Widths are said, so that projections that were sharded since are an error.
        q = self["q_proj"](x).reshape(texts, rows, form.heads, form.query_dim)
        k = self["k_proj"](x).reshape(texts, rows, form.kv_heads, form.head_dim)
        v = self["v_proj"](x).reshape(texts, rows, form.kv_heads, form.value_dim)
        gate = None if form.gate is None else self["g_proj"](x) if form.gate == "head" else q[..., form.head_dim :]
        offset = cache.offset
        q, k = placing.fused(q, k, offset) if placing else placed(self, q, k, offset, form.head_dim)
        if form.value_scale is not None:
            v = v * form.value_scale
        views = cache.update_and_fetch(k, v.swapaxes(1, 2))
        if site and site.serves(q, cache):
            return self["o_proj"](site.fused(q, cache, offset, gate))
        how = {"cache": cache, "scale": self.scale, "mask": mask, "sinks": self.attention.sinks}
        out = scaled_dot_product_attention(q, *views, **how).swapaxes(1, 2)
        if gate is not None:
            out = out * mx.sigmoid(gate).reshape(texts, rows, form.heads, -1)
        return self["o_proj"](out.reshape(texts, rows, -1))
