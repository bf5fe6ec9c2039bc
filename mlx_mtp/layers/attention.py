"""Attention of a verify's rows in one pass over keys and values, in the place of mlx-lm's modules.

Two sites to a module: norms and RoPE of queries and keys in one launch, and the attention itself, which reads the
cache's whole buffers. The latter's rows have bits of their own, so plain decoding uses it as well.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import scaled_dot_product_attention

from ..kernels import Rope, attention_served, norm_rope, verify_attention, verify_attention_ref
from .site import VERIFY_ROWS, rows_of

Pair = tuple[mx.array, mx.array]


@functools.lru_cache(maxsize=2)
def device_offset(offset: int) -> mx.array:
    return mx.array([offset])


def on_device(offset: int | mx.array) -> mx.array:
    """[1] int32; one array for all layers of a forward pass."""
    return device_offset(offset) if isinstance(offset, int) else offset


@dataclass(frozen=True)
class Form:
    """What differs between the families' attentions.

    gate: None, "head" (a product of its own, one logit per head) or "value" (the second half of each head's queries).
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    gate: str | None
    value_scale: float | None

    @classmethod
    def of(cls, module: Any) -> "Form":
        names = ("num_heads", "n_heads", "num_attention_heads"), ("num_kv_heads", "n_kv_heads", "num_key_value_heads")
        heads, kv_heads = (next(getattr(module, n) for n in alike if hasattr(module, n)) for alike in names)
        width, head_dim, value_dim = (
            _columns(module[n]) // of for n, of in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))
        )
        doubled = width == 2 * head_dim
        gate = "value" if doubled else "head" if getattr(module, "use_head_wise_attn_gate", False) else None
        return cls(heads, kv_heads, head_dim, value_dim, gate, getattr(module, "value_scale", None))

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        return f"{self.heads}/{self.kv_heads}x{dims}"


def _columns(linear: Any) -> int:
    """Of its product; an adapter has the linear that it changes inside."""
    return linear.get("linear", linear).weight.shape[0]


class NormRope:
    """Norms, where there are any, and RoPE of an attention's queries and keys."""

    op = "norm_rope"
    candidates = (1, *VERIFY_ROWS)
    stock_exact = True
    OFFSET = 2000  # where the rows of a trial are

    def __init__(self, module: Any, form: Form, rope: Rope):
        self.module, self.form, self.rope, self.rows = module, form, rope, frozenset()

    @property
    def shape(self) -> str:
        angles = "freqs" if self.rope.base is None else f"base {self.rope.base:g}"
        marks = {
            "traditional": self.rope.traditional,
            "normed": "q_norm" in self.module,
            "gated": self.form.gate == "value",
        }
        return " ".join([f"{self.form} rope {self.rope.dims} {angles}", *(name for name, on in marks.items() if on)])

    @property
    def width(self) -> int:
        """Of queries, whatever is between them, and keys, side by side."""
        return self._query_width + self.form.kv_heads * self.form.head_dim

    @property
    def _query_width(self) -> int:
        return self.form.heads * self.form.head_dim * (2 if self.form.gate == "value" else 1)

    def fused(self, q: mx.array, k: mx.array, offset: int | mx.array) -> Pair:
        """q [1, L, Hq, D or more], k [1, L, Hk, D] -> [1, Hq, L, D], [1, Hk, L, D]."""
        m, normed = self.module, "q_norm" in self.module
        more = {"q_weight": m.q_norm.weight, "k_weight": m.k_norm.weight, "eps": m.q_norm.eps} if normed else {}
        return norm_rope(q, k, on_device(offset), self.rope, head_dim=self.form.head_dim, **more)

    def ours(self, x: mx.array) -> list[mx.array]:
        return self._flat(self.fused(*self._split(x), device_offset(self.OFFSET)), len(x))

    def stock(self, x: mx.array) -> list[mx.array]:
        return self._flat(
            placed(self.module, *self._split(x), device_offset(self.OFFSET), self.form.head_dim), len(x)
        )

    def alone(self, x: mx.array) -> list[mx.array]:
        found = [
            self._flat(
                placed(self.module, *self._split(x[i : i + 1]), mx.array([self.OFFSET + i]), self.form.head_dim), 1
            )
            for i in range(len(x))
        ]
        return [mx.concatenate(list(rows)) for rows in zip(*found, strict=True)]

    def _split(self, x: mx.array) -> Pair:
        q, k = mx.split(x[None], [self._query_width], axis=-1)
        return q.reshape(1, len(x), self.form.heads, -1), k.reshape(1, len(x), self.form.kv_heads, -1)

    def _flat(self, pair: Pair, rows: int) -> list[mx.array]:
        return [a.swapaxes(1, 2).reshape(rows, -1) for a in pair]


def placed(module: Any, q: mx.array, k: mx.array, offset: int | mx.array, head_dim: int) -> Pair:
    """What NormRope does, in MLX's own operations."""
    q = q[..., :head_dim]
    if "q_norm" in module:
        q, k = module.q_norm(q), module.k_norm(k)
    q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
    rope = getattr(module, "rope", None)
    return (q, k) if rope is None else (rope(q, offset=offset), rope(k, offset=offset))


def cache_format(cache: Any) -> tuple[int, int] | None:
    """(bits, group size) of a cache's keys and values; None where they are not quantized."""
    return (cache.bits, cache.group_size) if hasattr(cache, "bits") else None


def keys_and_values(parts: Sequence[mx.array]) -> tuple[Any, Any]:
    """Of a cache's buffers: two arrays, or two triples."""
    half = len(parts) // 2
    return (parts[0], parts[1]) if half == 1 else (tuple(parts[:half]), tuple(parts[half:]))


class Attention:
    """The attention behind its projections, over a cache of one format; `quantized` has those of other formats."""

    candidates = (1, *VERIFY_ROWS)
    own_bits = True
    OFFSET, SLOTS = 2000, 2048  # where the rows of a trial are, in caches of what size

    def __init__(self, module: Any, form: Form, make_cache: Callable[[], Any]):
        self.module, self.form, self.make_cache = module, form, make_cache
        self.format = cache_format(make_cache())
        self.quantized: list[Attention] = []
        self.rows = frozenset()

    @property
    def op(self) -> str:
        return "verify_attention" + ("" if self.format is None else f" of {self.format[0]}-bit caches")

    @property
    def seldom(self) -> bool:
        """Asked for by few, and tried after all else."""
        return self.format is not None

    def of(self, cache: Any) -> "Attention | None":
        """The site that reads this cache; None where none knows its format, or it keeps its first positions."""
        if getattr(cache, "keep", 0):  # mlx-lm's own have none
            return None
        wanted = cache_format(cache)
        return next((site for site in (self, *self.quantized) if site.format == wanted), None)

    @property
    def rows(self) -> frozenset[int]:
        return self.on

    @rows.setter
    def rows(self, rows: frozenset[int]) -> None:
        self.on, self.tried = rows, None  # what a trial has read is let go

    @property
    def sinks(self) -> mx.array | None:
        return self.module.get("attention_sink_bias")

    @property
    def shape(self) -> str:
        window = self.make_cache().window
        return f"{self.form}{f' window {window}' if window else ''}{'' if self.sinks is None else ' sinks'}"

    @property
    def width(self) -> int:
        return self.form.heads * self.form.head_dim

    def serves(self, q: mx.array, cache: Any) -> bool:
        """Whether what the cache holds is of a form that the kernel takes."""
        bits, group_size = self.format or (None, 64)
        return attention_served(q, *keys_and_values(cache.parts), group_size=group_size, bits=bits)

    def fused(
        self,
        q: mx.array,
        cache: Any,
        offset: int | mx.array,
        gate: mx.array | None,
        op: Callable[..., mx.array] = verify_attention,
    ) -> mx.array:
        """Queries [1, Hq, L, D] at positions from `offset` on, whose keys `cache` holds: [1, L, Hq * Dv]."""
        more: dict[str, Any] = {"limit": cache.limit, "window": cache.window, "start": cache.start}
        if self.format is not None:
            more["bits"], more["group_size"] = self.format
        scale, stored = self.module.scale, keys_and_values(cache.parts)
        return op(q, *stored, on_device(offset), scale=scale, sinks=self.sinks, gate=gate, **more)

    def ours(self, x: mx.array) -> list[mx.array]:
        return [self._read(x, self.OFFSET)]

    def alone(self, x: mx.array) -> list[mx.array]:
        return [mx.concatenate([self._read(x[i : i + 1], self.OFFSET + i) for i in range(len(x))])]

    def truth(self, x: mx.array) -> list[mx.array]:
        self._before(x.dtype)
        return [self._read(x.astype(mx.float32), self.OFFSET, _in_float32)]

    def stock(self, x: mx.array) -> list[mx.array]:
        parts, masks = self._before(x.dtype)
        mask, q = masks[len(x)], self._queries(x)
        stored = keys_and_values([part[..., : mask.shape[-1], :] for part in parts])
        how = {"cache": self.make_cache(), "scale": self.module.scale, "mask": mask, "sinks": self.sinks}
        return [scaled_dot_product_attention(q, *stored, **how).swapaxes(1, 2).reshape(len(x), -1)]

    def _read(self, x: mx.array, offset: int, op: Callable[..., mx.array] = verify_attention) -> mx.array:
        parts = self._before(x.dtype)[0]
        cache = self._filled(parts if self.format else [part.astype(x.dtype) for part in parts])
        return self.fused(self._queries(x), cache, device_offset(offset), None, op)[0]

    def _queries(self, x: mx.array) -> mx.array:
        return x.reshape(1, len(x), self.form.heads, -1).swapaxes(1, 2)

    def _before(self, dtype: mx.Dtype) -> Any:
        """Random keys and values wherever a row of the trial may look, and each number of rows' mask; made once."""
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


def _in_float32(*arrays: mx.array, limit: int, **more: Any) -> mx.array:
    return verify_attention_ref(*arrays, **more)


class VerifyAttention:
    """Mixin in front of an attention with one projection each for queries, keys and values."""

    attention: Attention
    placing: NormRope | None

    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        rows, form = rows_of(x), self.attention.form
        site = None if cache is None else self.attention.of(cache)
        fused = site if site and rows in site.rows else None
        placing = self.placing if self.placing and rows in self.placing.rows else None
        alone = len(x) == 1 and hasattr(cache, "parts")  # mlx-lm's caches have none
        if cache is None or not alone or not (fused or placing):
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        # Widths are said, so that projections that were sharded since are an error.
        width = form.head_dim * (2 if form.gate == "value" else 1)
        q = self.q_proj(x).reshape(1, rows, form.heads, width)
        k = self.k_proj(x).reshape(1, rows, form.kv_heads, form.head_dim)
        v = self.v_proj(x).reshape(1, rows, form.kv_heads, form.value_dim)
        gate = None if form.gate is None else self.g_proj(x) if form.gate == "head" else q[..., form.head_dim :]
        offset = cache.offset
        q, k = placing.fused(q, k, offset) if placing else placed(self, q, k, offset, form.head_dim)
        if form.value_scale is not None:
            v = v * form.value_scale
        views = cache.update_and_fetch(k, v.swapaxes(1, 2))
        gate = None if gate is None else gate.reshape(1, rows, -1)
        if fused and fused.serves(q, cache):
            return self.o_proj(fused.fused(q, cache, offset, gate))
        return self.o_proj(self._attended(q, views, mask, cache, gate))

    def _attended(self: Any, q: mx.array, views: Any, mask: Any, cache: Any, gate: mx.array | None) -> mx.array:
        """MLX's attention, gated: [1, L, Hq * Dv]."""
        sinks = self.attention.sinks
        out = scaled_dot_product_attention(q, *views, cache=cache, scale=self.scale, mask=mask, sinks=sinks)
        out = out.swapaxes(1, 2)
        if gate is not None:
            out = out * mx.sigmoid(gate).reshape(*out.shape[:3], -1)
        return out.reshape(*out.shape[:2], -1)
