"""Norm and rotate an attention's queries and keys in one launch instead of mlx-lm's modules."""

import functools
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..kernels import RopeArguments, norm_rope
from .adapters import shape_of
from .kernel_site import Site, side_by_side

RowPair = tuple[mx.array, mx.array]
Offset = int | mx.array  # a position: an int on the host or int32 [1] on the device


@functools.lru_cache(maxsize=2)
def device_offset(offset: int) -> mx.array:
    """Return a position as int32 [1] on the device; all layers of a forward pass share the array."""
    return mx.array([offset])


def on_device(offset: Offset) -> mx.array:
    """Return a position as int32 [1] on the device; arrays, also of several positions, are returned unchanged."""
    return device_offset(offset) if isinstance(offset, int) else offset


@dataclass(frozen=True)
class AttentionForm:
    """The parameters in which families' attentions differ.

    gate: None, "head" (one logit per head from a product of its own) or "value" (second half of each head's queries).
    value_scale: a factor on the values, or None.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    gate: str | None
    value_scale: float | None

    @classmethod
    def of(cls, module: Any) -> "AttentionForm":
        """Return the form of one of mlx-lm's attention modules."""
        names = ("num_heads", "n_heads", "num_attention_heads"), ("num_kv_heads", "n_kv_heads", "num_key_value_heads")
        heads, kv_heads = (next(getattr(module, n) for n in alike if hasattr(module, n)) for alike in names)
        columns = [shape_of(module[name])[0] for name in ("q_proj", "k_proj", "v_proj")]
        width, head_dim, value_dim = columns[0] // heads, columns[1] // kv_heads, columns[2] // kv_heads
        doubled = width == 2 * head_dim
        gate = "value" if doubled else "head" if getattr(module, "use_head_wise_attn_gate", False) else None
        return cls(heads, kv_heads, head_dim, value_dim, gate, getattr(module, "value_scale", None))

    @property
    def query_dim(self) -> int:
        """Number of values that a head's queries are projected to, including a gate."""
        return self.head_dim * (2 if self.gate == "value" else 1)

    def __str__(self) -> str:
        dims = f"{self.head_dim}" if self.head_dim == self.value_dim else f"{self.head_dim}/{self.value_dim}"
        return f"{self.heads}/{self.kv_heads}x{dims}"


class NormRope(Site):
    """The optional norms and the RoPE of an attention; its x are queries and keys, concatenated."""

    op = "norm_rope"
    stock_exact = True
    OFFSET = 2000  # first position of a kernel trial's rows

    def __init__(self, module: Any, form: AttentionForm, rope: RopeArguments):
        self.module, self.form, self.rope = module, form, rope
        self.width = form.heads * form.query_dim + form.kv_heads * form.head_dim
        angles = "freqs" if rope.base is None else f"base {rope.base:g}"
        marks = {"traditional": rope.traditional, "normed": "q_norm" in module, "gated": form.gate == "value"}
        self.shape = " ".join([f"{form} rope {rope.dims} {angles}", *(name for name, on in marks.items() if on)])

    def fused(self, q: mx.array, k: mx.array, offset: Offset) -> RowPair:
        """Norm and rotate the first D values of q [B, L, Hq, D or more] and k [B, L, Hk, D]: [B, Hq or Hk, L, D]."""
        m, normed = self.module, "q_norm" in self.module
        more = {"q_weight": m.q_norm.weight, "k_weight": m.k_norm.weight, "eps": m.q_norm.eps} if normed else {}
        return norm_rope(q, k, on_device(offset), self.rope, head_dim=self.form.head_dim, **more)

    def ours(self, x: mx.array) -> list[mx.array]:
        return [*map(side_by_side, self.fused(*self._split(x), self.OFFSET))]

    def stock(self, x: mx.array) -> list[mx.array]:
        return self._placed(x, self.OFFSET)

    def alone(self, x: mx.array) -> list[mx.array]:
        found = [self._placed(x[i : i + 1], self.OFFSET + i) for i in range(len(x))]
        return [mx.concatenate(list(rows)) for rows in zip(*found, strict=True)]

    def _placed(self, x: mx.array, offset: int) -> list[mx.array]:
        found = placed(self.module, *self._split(x), mx.array([offset]), self.form.head_dim)
        return [*map(side_by_side, found)]

    def _split(self, x: mx.array) -> RowPair:
        q, k = mx.split(x[None], [self.form.heads * self.form.query_dim], axis=-1)
        return q.reshape(1, len(x), self.form.heads, -1), k.reshape(1, len(x), self.form.kv_heads, -1)


def placed(module: Any, q: mx.array, k: mx.array, offset: Offset, head_dim: int) -> RowPair:
    """Norm and rotate q and k [B, L, heads, D] by the module's norms and RoPE, if any: [B, heads, L, head_dim].

    Only the first `head_dim` values of q's heads are used; k's heads are used whole.
    """
    q = q[..., :head_dim]
    if "q_norm" in module:
        q, k = module.q_norm(q), module.k_norm(k)
    q, k = q.swapaxes(1, 2), k.swapaxes(1, 2)
    rope = getattr(module, "rope", None)
    return (q, k) if rope is None else (rope(q, offset=offset), rope(k, offset=offset))
