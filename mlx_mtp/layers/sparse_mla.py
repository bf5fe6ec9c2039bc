"""Attend each row to the few positions that an indexer selects for it (DeepSeek Sparse Attention).

The cache holds the indexer's keys in addition to latent rows and rotated keys. One position is one row of all three,
so they roll back, grow and are saved together. A verify's rows gather the selected positions in ascending order, so a
row's arithmetic depends neither on the other rows nor on the buffer's length. Ties go to the later position, as in
mlx-lm. Source: DeepSeek-V3.2 (arXiv 2512.02556), section 2.1.
"""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from .kernel_site import side_by_side
from .mla import ABSORBED_ROWS, AbsorbedMLA, LatentAttention, Mask
from .norm_rope import Offset

SCORED_ROWS = 64  # prompt rows scored at a time: every indexer head scores every position


@dataclass
class Chosen:
    """The last indexer's selection, for layers without an indexer.

    slots: for each sequence [L, index_topk], or None, which selects all slots.
    """

    slots: list[mx.array | None] = field(default_factory=list)


class ChosenAttention(LatentAttention):
    """Attention of a module's absorbed queries to the `count` latent rows that each selects, or to all if there are
    fewer.

    In a trial a row's selection is spread over all positions up to its own.
    """

    varies = False  # reads the same number of rows at any context length

    def __init__(self, module: Any, count: int):
        super().__init__(module)
        self.count, self.OFFSET, self.SLOTS = count, 2 * count, 2 * count + ABSORBED_ROWS
        self.shape += f" {count} chosen"

    def stock(self, x: mx.array) -> list[mx.array]:
        parts = self._before(x.dtype)
        out = self.module.attend_to(self._chosen(self.OFFSET, len(x)), *self._queries(x), *parts, None)
        return [side_by_side(out)]

    def _chosen(self, offset: int, rows: int) -> mx.array:
        return mx.arange(self.count) * (offset + 1 + mx.arange(rows)[:, None]) // self.count


class SparseMLA(AbsorbedMLA):
    """Mixin for mlx-lm's MLA attention with an indexer that replaces `__call__` if there is a cache.

    handed_on: shared between layers; a layer with an `indexer` writes its selection, a layer without one reads it.
    """

    handed_on: Chosen | None = None

    def __call__(self: Any, x: mx.array, mask: Mask = None, cache: Any = None) -> mx.array:
        if cache is None:
            return super().__call__(x, mask, cache)
        offset, n = cache.offset, len(x)
        compressed = self.q_a_layernorm(self.q_a_proj(x))
        q, q_pe, *rows = self.placed(self.q_b_proj(compressed), x, offset)
        if "indexer" in self:
            rows.append(self.indexer.rope(self.indexer.k_norm(self.indexer.wk(x))[:, None], offset))  # [n, 1, L, D]
        arrays = x, compressed, q, q_pe, *cache.update_and_fetch(*rows)
        # An iteration would split the mask in each layer; `mx.compile` merges equal splits, and then fails to fuse.
        masks = [mask] if mask is None or mask.ndim == 2 else [mask[i, 0] for i in range(n)]
        if n == 1:
            return self.output(self.attended(0, masks[0], cache, offset, *arrays))
        sequences = [[a[i : i + 1] for a in (offset, *arrays)] for i in range(n)]
        outputs = [self.attended(i, masks[i], None, *arrays) for i, arrays in enumerate(sequences)]
        return self.output(mx.concatenate(outputs))

    def attended(self: Any, index: int, mask: Mask, cache: Any, offset: Offset, *arrays: mx.array) -> mx.array:
        """Attend the rows of sequence `index` to the positions that its indexer `keys` select or, without keys, to
        those that an earlier layer handed on.

        Returns the heads' values [1, heads, L, Dv]; a selection is also written to `handed_on`, if that is not None.
        arrays: x, the normed q_a_proj(x), q, q_pe, then the sequence's latent rows, rotated keys and, with an
        indexer, its keys. cache: this sequence's own, for a kernel that reads its buffers; None for a pool.
        """
        x, compressed, q, q_pe, latent, k_pe, *keys = arrays
        chosen = self.choose(x, compressed, keys[0], mask, offset) if keys else self.handed_on.slots[index]
        if keys and self.handed_on:
            self.handed_on.slots[index:] = [chosen]
        if x.shape[1] > ABSORBED_ROWS:
            if chosen is not None:
                mask = among(chosen, mask, latent.shape[2])
            k, v = self.embed_q(latent, transpose=False), self.unembed_out(latent)
            return self.attend(self.unplaced(q), q_pe, k, v, k_pe, mask)
        q = self.absorbed(q)
        if cache is not None and self.latent is not None and self.latent.serves(q, cache):
            out = self.latent.fused(q, q_pe, cache, offset, chosen=chosen)
        elif chosen is None:
            out = self.attend(q, q_pe, latent, latent, k_pe, mask)
        else:
            out = self.attend_to(chosen, q, q_pe, latent, k_pe, mask)
        return self.unembed_out(out)

    def attend_to(
        self: Any, chosen: mx.array, q: mx.array, q_pe: mx.array, latent: mx.array, k_pe: mx.array, mask: Mask
    ) -> mx.array:
        """Attend absorbed queries [1, heads, L, D] to each row's selected [L, topk] of latent and k_pe [1, 1, S, D].

        The rows become a batch, each with its own keys, which its heads share. Returns [1, heads, L, latent].
        """
        latent, k_pe = (mx.take(a[0, 0], chosen, axis=0)[:, None] for a in (latent, k_pe))  # [L, 1, topk, D]
        if mask is not None:
            mask = mx.take_along_axis(mask, chosen, axis=-1)[:, None, None]
        q, q_pe = (a.transpose(2, 0, 1, 3) for a in (q, q_pe))  # [L, 1, heads, D]
        return self.attend(q, q_pe, latent, latent, k_pe, mask).transpose(1, 2, 0, 3)

    def choose(
        self: Any, x: mx.array, compressed: mx.array, keys: mx.array, mask: Mask, offset: Offset
    ) -> mx.array | None:
        """Select the slots [L, index_topk], ascending, of `keys` [1, 1, S, D] that rows x [1, L, H] attend to.

        compressed: the input of the query projection. Returns None if there are at most index_topk slots. A row that
        may attend to fewer also selects masked slots, so `mask` still applies.
        """
        indexer, L = self.indexer, x.shape[1]
        if keys.shape[2] <= indexer.index_topk:
            return None
        q = indexer.wq_b(compressed).reshape(1, L, indexer.n_heads, indexer.head_dim).swapaxes(1, 2)
        q = indexer.rope(q, offset)[0].swapaxes(0, 1)  # [L, heads, D]
        weights = indexer.weights_proj(x)[0] * (indexer.n_heads**-0.5 * indexer.softmax_scale)
        blocks = []
        for first in range(0, L, SCORED_ROWS):
            rows = slice(first, first + SCORED_ROWS)
            # Run blocks in sequence; MLX would start several and hold the scores of all.
            (queries,) = mx.depends([q[rows]], blocks[-1:])
            scores = index_scores(queries, weights[rows], keys[0, 0])
            if mask is not None:
                scores = mx.where(mask[rows], scores, -mx.inf)
            best = mx.argpartition(scores, kth=-indexer.index_topk, axis=-1)[:, -indexer.index_topk :]
            blocks.append(mx.sort(best, axis=-1))
        return mx.concatenate(blocks)


def index_scores(q: mx.array, weights: mx.array, keys: mx.array) -> mx.array:
    """Score keys [S, D] for queries [L, heads, D]: rectified products, summed with weights [L, heads] to [L, S]."""
    L, heads, D = q.shape
    products = mx.maximum(q.reshape(L * heads, D) @ keys.T, 0).reshape(L, heads, -1)
    return (weights[:, None] @ products)[:, 0]


def among(chosen: mx.array, mask: Mask, slots: int) -> mx.array:
    """Return a boolean mask [L, slots] of the slots in `chosen` [L, k] that `mask` does not hide."""
    rows = mx.put_along_axis(mx.zeros((chosen.shape[0], slots), mx.bool_), chosen, mx.array(True), axis=-1)
    return rows if mask is None else rows & mask
