"""Run multi-head latent attention (MLA) absorbed for a few rows, and share code of its ports.

mlx-lm absorbs the key and value projections into query and output for one row only; for two or more rows it expands
the whole latent cache to full heads. Here up to ABSORBED_ROWS rows are absorbed, so a verify reads the latent cache
once. Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
from mlx_lm.models.mla import QuantizedMultiLinear

from ..cache.ring import MAX_ROWS
from ..kernels import (
    Quantized,
    matrix_heads,
    splits,
    verify_latent_attention,
    verify_latent_attention_ref,
    verify_qmm_heads,
    verify_qmm_heads_ref,
)
from .attention import CachedAttention
from .blocks import BlockMultiLinear, is_blocks
from .kernel_site import Site, format_of, quantized, side_by_side
from .norm_rope import NormRope, Offset, on_device
from .port import MLA_KV_B, NEXTN, NUMBERED_EXPERTS, SCALED_FP8, Port

ABSORBED_ROWS = MAX_ROWS
Mask = mx.array | None  # boolean [L, S] or broadcast to it


class PerHead(Site):
    """The products of a `QuantizedMultiLinear`, [heads, N, K].

    heads_first: whether the output has the head axis before the row axis in memory.
    """

    op = "verify_qmm_heads"  # for a single row, too: there MLX copies queries that are split from rotated ones

    def __init__(self, module: Any, *, heads_first: bool):
        self.module, self.heads_first = module, heads_first
        w = self.weights
        self.width = self.heads * w.k
        order = "heads first" if heads_first else "rows first"
        self.shape = f"{self.heads} heads x {w.ends[0]}x{w.k} {format_of(w)} {order}"

    @property
    def weights(self) -> Quantized:
        return quantized(self.module)

    @property
    def heads(self) -> int:
        return self.module.weight.shape[0]

    def product(self, x: mx.array) -> mx.array:
        """Multiply the first K values of x [n, L, heads, D]: [n, heads, L, N], in the memory order of `heads_first`.

        The rows of n sequences share a launch; each row has the bits that it has alone.
        """
        return self._product(x, x.shape[1] in self.split)

    def _product(self, x: mx.array, split: bool) -> mx.array:
        n, rows, heads, _ = x.shape
        x = x.reshape(1, n * rows, heads, -1)
        if self.matrix:
            y = matrix_heads(x, self.weights, heads_first=self.heads_first)
        else:
            y = verify_qmm_heads(x, self.weights, heads_first=self.heads_first, split=split)
        if self.heads_first:
            return y.reshape(heads, n, rows, -1).swapaxes(0, 1)
        return y.reshape(n, rows, heads, -1).swapaxes(1, 2)

    def splits(self, rows: int) -> bool:
        return not self.matrix and splits(rows)

    def computed(self, x: mx.array, split: bool) -> list[mx.array]:
        return [side_by_side(self._product(x.reshape(1, len(x), self.heads, -1), split))]

    def stock(self, x: mx.array) -> list[mx.array]:
        heads = x.reshape(1, len(x), self.heads, -1).swapaxes(1, 2)
        return [side_by_side(QuantizedMultiLinear.__call__(self.module, heads))]


class OwnPerHead(PerHead):
    """The products of a `QuantizedMultiLinear` or `BlockMultiLinear` with our bits (see `products.OwnStack`)."""

    own_bits = True

    def stock(self, x: mx.array) -> list[mx.array]:
        heads = x.reshape(1, len(x), self.heads, -1).swapaxes(1, 2)
        kind = BlockMultiLinear if is_blocks(self.module) else QuantizedMultiLinear
        return [side_by_side(kind.__call__(self.module, heads))]

    def truth(self, x: mx.array) -> list[mx.array]:
        wide = x.astype(mx.float32).reshape(1, len(x), self.heads, -1)
        y = verify_qmm_heads_ref(wide, self.weights, heads_first=self.heads_first)
        return [side_by_side(y if self.heads_first else y.swapaxes(1, 2))]


class VerifyMultiLinear:
    """Mixin for a `QuantizedMultiLinear` that runs its site where it is on."""

    site: PerHead

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        """Multiply x [n, heads, L, K] to [n, heads, L, N]; without `transpose` in the other direction."""
        heads = x.shape[1]
        if transpose and heads == self.site.heads and x.shape[2] in self.site.rows:
            return self.site.product(x.swapaxes(1, 2))
        return super().__call__(x, transpose)  # type: ignore[misc]


class LatentAttention(CachedAttention):
    """Attention of a module's absorbed queries to a cache's latent rows, read from its whole buffers.

    Its x are queries: for each head the absorbed values, then the rotated ones.
    """

    op, reference = "verify_latent_attention", staticmethod(verify_latent_attention_ref)

    def __init__(self, module: Any):
        self.module, self.dims = module, [module.kv_lora_rank, module.qk_rope_head_dim]
        self.shape = f"{module.num_heads}x{'+'.join(map(str, self.dims))}"
        self.width = module.num_heads * sum(self.dims)

    def serves(self, q: mx.array, cache: Any) -> bool:
        """Return whether the site is on for the rows of q [1, heads, L, D], and `cache` stores position p in slot p.

        False for a ring, a pool, or a cache of mlx-lm.
        """
        ours = hasattr(cache, "parts") and not hasattr(cache, "span") and cache.window is None
        return ours and self.serves_rows(q.shape[2], cache)

    def fused(
        self,
        q: mx.array,
        q_pe: mx.array,
        cache: Any,
        offset: Offset,
        op: Callable = verify_latent_attention,
        chosen: mx.array | None = None,
    ) -> mx.array:
        """Attend queries at positions from `offset` on to a cache's latent rows: [1, heads, L, latent width].

        chosen: integers [L, C], the slots that each row attends to; None: all positions up to its own.
        """
        where = {"limit": cache.limit, "start": cache.start, "chosen": chosen}
        return op(q, q_pe, *cache.parts[:2], on_device(offset), scale=self.module.scale, **where)

    def stock(self, x: mx.array) -> list[mx.array]:
        latent, k_pe = (part[:, :, : self.OFFSET + len(x)] for part in self._before(x.dtype))
        seen = mx.arange(self.OFFSET + len(x))[None] <= self.OFFSET + mx.arange(len(x))[:, None]
        q, q_pe = self._queries(x)
        return [side_by_side(self.module.attend(q, q_pe, latent, latent, k_pe, seen))]

    def _read(self, x: mx.array, offset: int, op: Callable = verify_latent_attention) -> mx.array:
        parts = [part.astype(x.dtype) for part in self._before(x.dtype)]
        cache = SimpleNamespace(parts=parts, limit=offset + len(x), start=0)
        return side_by_side(self.fused(*self._queries(x), cache, offset, op, self._chosen(offset, len(x))))

    def _chosen(self, offset: int, rows: int) -> mx.array | None:
        """Return the slots that a trial's rows attend to, as the `chosen` of `fused`; here None, for all."""
        return None

    def _queries(self, x: mx.array) -> tuple[mx.array, mx.array]:
        q, q_pe = mx.split(x.reshape(1, len(x), self.module.num_heads, -1).swapaxes(1, 2), self.dims[:1], axis=-1)
        return q, q_pe

    def _before(self, dtype: mx.Dtype) -> list[mx.array]:
        """Return random latent rows and rotated keys for all positions that a trial's rows may read."""
        if not self.tried:
            shape = (1, 1, self.SLOTS)
            self.tried = [mx.random.normal((*shape, d), dtype, key=mx.random.key(d)) for d in self.dims]
            mx.eval(self.tried)
        return self.tried


class AbsorbedMLA:
    """Mixin for mlx-lm's MLA attention modules that replaces `__call__` for a few rows if there is a cache.

    `latent` and `placing` are sites or None. Submodules are read by key, because an attribute lookup costs 0.4 us
    more.
    """

    latent: LatentAttention | None = None
    placing: NormRope | None = None

    def __call__(self: Any, x: mx.array, mask: Mask = None, cache: Any = None) -> mx.array:
        """Append rows x [n, L, H] to `cache`, and attend to those of its rows that `mask` allows: [n, L, H].

        mask: boolean, broadcast to [n, heads, L, S], or None for all. Without a cache, or for more than ABSORBED_ROWS
        rows, mlx-lm's module runs.
        """
        if cache is None or x.shape[1] > ABSORBED_ROWS:
            return super().__call__(x, mask, cache)  # type: ignore[misc]
        offset = cache.offset
        if self.q_lora_rank is None:
            q = self["q_proj"](x)
        else:
            q = self["q_b_proj"](self["q_a_layernorm"](self["q_a_proj"](x)))
        q, q_pe, *rows = self.placed(q, x, offset)
        latent, k_pe = cache.update_and_fetch(*rows)
        q = self.absorbed(q)
        if self.latent is not None and self.latent.serves(q, cache):
            out = self.latent.fused(q, q_pe, cache, offset)
        else:
            out = self.attend(q, q_pe, latent, latent, k_pe, mask)
        return self.output(self["unembed_out"](out))

    def placed(self: Any, q: mx.array, x: mx.array, offset: Offset) -> tuple[mx.array, mx.array, mx.array, mx.array]:
        """Apply positions from `offset` on to rows x [n, L, H] and their queries q [n, L, heads * D].

        Returns q [n, L, heads, D], not rotated; its last qk_rope_head_dim values, rotated [n, heads, L, ..]; and the
        latent rows and rotated keys [n, 1, L, ..] for the cache.
        """
        q = q.reshape(*x.shape[:2], self.num_heads, self.q_head_dim)
        latent, k_pe = mx.split(self["kv_a_proj_with_mqa"](x), [self.kv_lora_rank], axis=-1)
        q_pe = q[:, :, :, self.qk_nope_head_dim :]
        if self.placing is not None and x.shape[1] in self.placing.rows:
            q_pe, k_pe = self.placing.fused(q_pe, mx.expand_dims(k_pe, 2), offset)
        else:
            rope = self["rope"]
            q_pe, k_pe = rope(q_pe.swapaxes(1, 2), offset), rope(mx.expand_dims(k_pe, 1), offset)
        return q, q_pe, mx.expand_dims(self["kv_a_layernorm"](latent), 1), k_pe

    def absorbed(self: Any, q: mx.array) -> mx.array:
        """Multiply the first qk_nope_head_dim values of queries [n, L, heads, D] by `embed_q`: [n, heads, L, R]."""
        embed = self["embed_q"]
        if isinstance(embed, VerifyMultiLinear) and q.shape[1] in embed.site.rows:
            return embed.site.product(q)
        return embed(self.unplaced(q))

    def unplaced(self: Any, q: mx.array) -> mx.array:
        """Return the first qk_nope_head_dim values of queries [n, L, heads, D]: [n, heads, L, ..]."""
        return q[:, :, :, : self.qk_nope_head_dim].swapaxes(1, 2)

    def attend(
        self: Any, q: mx.array, q_pe: mx.array, k: mx.array, v: mx.array, k_pe: mx.array, mask: Mask
    ) -> mx.array:
        """Return the attention's output [B, heads, L, Dv], with scores scale * (q k^T + q_pe k_pe^T).

        mask: boolean, broadcast to the scores [B, heads, L, S], or None for all.

        Heads that share keys become rows of one product, which reads the cache once instead of once per head.
        """
        B, heads, L, _ = q.shape
        whole, folded = (B, heads, L, -1), (B, 1, heads * L, -1)
        scores = (q_pe * self.scale).reshape(folded) @ k_pe.swapaxes(-1, -2)
        if mask is not None:
            scores = mx.where(mask, scores.reshape(whole), mx.finfo(scores.dtype).min)
        if k.shape[1] > 1:
            return mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=scores.reshape(whole))
        q, scores = q.reshape(folded), scores.reshape(folded)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=self.scale, mask=scores).reshape(whole)

    def output(self: Any, out: mx.array) -> mx.array:
        """Project the heads' values [n, heads, L, Dv] to [n, L, H]."""
        return self["o_proj"](out.transpose(0, 2, 1, 3).flatten(-2))


class MLAPort(Port):
    """A port whose layers have latent attention and whose heads are further layers of the same kind."""

    SPEC = NEXTN
    IGNORED = ("rotary_emb.inv_freq",)
    RENAMED = (NUMBERED_EXPERTS, MLA_KV_B, SCALED_FP8)
    MASK_ARRAY = True
    NO_KV_BITS = "multi-head latent attention"
