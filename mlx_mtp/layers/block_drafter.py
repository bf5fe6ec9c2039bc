"""Run a block drafter: one pass over the newest token and mask tokens, which attend to the target's hidden states.

The context's keys and values come from `fused` rows of the target, the same for every layer. The block's own are
written behind them for the time of the pass. Source: DFlash (arXiv 2602.06036), whose tensor names are used here.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.activations import swiglu
from mlx_lm.models.base import scaled_dot_product_attention
from mlx_lm.models.rope_utils import initialize_rope

from .block_mask import Reach, block_mask
from .block_parts import CandidateSelector, ConfidenceHead, DynamicConv, MarkovHead


@dataclass(frozen=True)
class BlockShape:
    """Everything about a block drafter that is not a weight.

    taps: layers of the target (as numbers) after which `fc` reads the residual stream; captured: its width.
    drafts: drafts of a block as trained; anchored: the newest token's row drafts, too.
    reaches: what each layer attends to. rope: `initialize_rope`'s scaling_config.
    conv, selector: (taps, group) and (rank, candidates) of DFlash2, None without. markov: (kind, rank) of DSpark.
    confidence: whether there is a confidence head, with_markov: it reads the Markov head's embedding.
    draft_vocab: rows of the LM head. softcap, scale: logits are softcap(scale * logits). embed_scale: of embeddings.
    layers: number of the target's layers that it was trained for, None if not stated.
    frozen_embedding: the embedding in its checkpoint is a copy of the target's, which is used instead.
    """

    hidden_size: int
    captured: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    vocab: int
    draft_vocab: int
    taps: tuple[int, ...]
    drafts: int
    mask_token: int
    reaches: tuple[Reach, ...]
    rope_theta: float
    rope: dict[str, Any] | None
    positions: int
    interleaved: bool = False
    bias: bool = False
    anchored: bool = False
    conv: tuple[int, int] | None = None
    selector: tuple[int, int] | None = None
    markov: tuple[str, int] | None = None
    confidence: bool = False
    with_markov: bool = True
    softcap: float | None = None
    scale: float = 1.0
    embed_scale: float = 1.0
    layers: int | None = None
    frozen_embedding: bool = False

    def __str__(self) -> str:
        kind = "DFlash2" if self.selector else "DSpark" if self.markov else "DFlash"
        return f"{kind}, {len(self.reaches)} layers, blocks of {self.drafts} drafts"


class BlockPlace(NamedTuple):
    """Where the rows of a pass are: the block begins at `position`, int32 [n].

    context: context rows [n, R, H] that are written before the block, or None. order: int32 [n, R + b, 1]: for each
    position from the first context row's on, the index of the row written there, among the R context rows followed by
    the b rows of the block, which replace rejected context rows. masks: this pass's mask by reach; the first layer of
    each reach adds its mask, later layers use it.
    """

    position: mx.array
    context: mx.array | None
    order: mx.array | None
    masks: dict[Reach, mx.array]

    @classmethod
    def of(cls, first: mx.array, block: int, context: mx.array | None, last: mx.array | None) -> "BlockPlace":
        """Return the BlockPlace of a block of `block` rows in caches whose next position is `first`, int32 [n].

        It follows the context rows 0..last, with `last` int32 [n]; without these it begins at `first`.
        """
        if context is None or last is None:
            return cls(first, None, None, {})
        count, rows = last + 1, context.shape[1]
        row = mx.arange(rows + block)
        order = mx.where(row < count[:, None], row, mx.minimum(row - count[:, None], block - 1) + rows)
        return cls(first + count, context, order[..., None], {})

    def after_context(self, x: mx.array) -> mx.array:
        """Return the rows to write from the caches' position on, for a block's rows x [n, b, H]."""
        if self.context is None or self.order is None:
            return x
        return mx.take_along_axis(mx.concatenate([self.context, x], axis=1), self.order, axis=1)


class BlockAttention(nn.Module):
    """Attention of a block's rows to the context in a cache and to the block."""

    def __init__(self, shape: BlockShape, reach: Reach):
        super().__init__()
        width, D = shape.hidden_size, shape.head_dim
        self.reach, self.head_dim, self.scale = reach, D, D**-0.5
        linear = partial(nn.Linear, bias=shape.bias)
        self.q_proj, self.o_proj = linear(width, shape.heads * D), linear(shape.heads * D, width)
        self.k_proj, self.v_proj = linear(width, shape.kv_heads * D), linear(width, shape.kv_heads * D)
        self.q_norm, self.k_norm = nn.RMSNorm(D, shape.eps), nn.RMSNorm(D, shape.eps)

    def append(self, x: mx.array, kv: Any, rope: Any) -> tuple[Any, Any]:
        """Write keys and values of rows x [n, L, H] at the position of cache `kv`, which advances by L.

        Returns the pair that `kv.update_and_fetch` returns. rope: rotates the keys to their positions.
        """
        keys = rope(self["k_norm"](self._by_head(self["k_proj"](x))), kv.offset)
        return kv.update_and_fetch(keys, self._by_head(self["v_proj"](x)))

    def __call__(self, x: mx.array, kv: Any, rope: Any, place: BlockPlace) -> mx.array:
        """Return the output [n, b, H] for a block's rows x.

        Keys and values of the context in `place` and of x are written to the cache `kv`.
        """
        queries = rope(self["q_norm"](self._by_head(self["q_proj"](x))), place.position)
        keys, values = self.append(place.after_context(x), kv, rope)
        reach = self["reach"]
        if reach not in place.masks:
            slots = (keys[0] if isinstance(keys, tuple) else keys).shape[2]
            place.masks[reach] = block_mask(kv, place.position, x.shape[1], slots, reach)
        out = scaled_dot_product_attention(queries, keys, values, kv, self.scale, place.masks[reach])
        return self["o_proj"](out.swapaxes(1, 2).flatten(-2))

    def _by_head(self, x: mx.array) -> mx.array:
        return mx.unflatten(x, -1, (-1, self.head_dim)).swapaxes(1, 2)


class BlockMLP(nn.Module):
    """An MLP: down(swiglu(gate(x), up(x)))."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self["down_proj"](swiglu(self["gate_proj"](x), self["up_proj"](x)))


class BlockLayer(nn.Module):
    """A pre-norm decoder layer.

    In DFlash2, `attention_conv` and `mlp_conv` convolve the input and the output of their sub-layers.
    """

    def __init__(self, shape: BlockShape, reach: Reach):
        super().__init__()
        width = shape.hidden_size
        self.input_layernorm, self.post_attention_layernorm = (nn.RMSNorm(width, shape.eps) for _ in range(2))
        self.self_attn = BlockAttention(shape, reach)
        self.mlp = BlockMLP(width, shape.intermediate_size)
        if shape.conv:
            self.attention_conv, self.mlp_conv = (DynamicConv(width, *shape.conv) for _ in range(2))

    def __call__(self, x: mx.array, kv: Any, rope: Any, place: BlockPlace) -> mx.array:
        attend = partial(self["self_attn"], kv=kv, rope=rope, place=place)
        normed = self["input_layernorm"](x)
        x = x + (self["attention_conv"](normed, attend) if "attention_conv" in self else attend(normed))
        normed = self["post_attention_layernorm"](x)
        return x + (self["mlp_conv"](normed, self["mlp"]) if "mlp_conv" in self else self["mlp"](normed))


class BlockNetwork(nn.Module):
    """A block drafter's weights. parts: optional ones that its checkpoint has: "embed_tokens", "head", "d2t"."""

    NO_KV_BITS: str | None = None  # its attention supports quantized caches even if the target's does not

    def __init__(self, shape: BlockShape, parts: set[str]):
        super().__init__()
        self.shape = shape
        width = shape.hidden_size
        self.fc = nn.Linear(len(shape.taps) * shape.captured, width, bias=False)
        self.hidden_norm, self.norm = nn.RMSNorm(width, shape.eps), nn.RMSNorm(width, shape.eps)
        self.layers = [BlockLayer(shape, reach) for reach in shape.reaches]
        rope = shape.head_dim, shape.rope_theta, shape.interleaved, shape.rope, shape.positions
        self.rope = initialize_rope(*rope)
        if shape.selector:
            self.candidate_selector = CandidateSelector(width, shape.vocab, *shape.selector)
        if shape.markov:
            kind, rank = shape.markov
            self.markov_head = MarkovHead(kind, width, shape.vocab, shape.draft_vocab, rank)
        if shape.confidence:
            self.confidence_head = ConfidenceHead(width, shape.markov[1] if shape.markov and shape.with_markov else 0)
        if "embed_tokens" in parts:
            self.embed_tokens = nn.Embedding(shape.vocab, width)
        if "head" in parts:
            self.head = nn.Linear(width, shape.draft_vocab, bias=False)
        if "d2t" in parts:
            self.d2t = mx.zeros((shape.draft_vocab,), mx.int64)

    @property
    def head_dim(self) -> int:
        return self.shape.head_dim

    @property
    def dtype(self) -> mx.Dtype:
        """The type of its activations."""
        return self["norm"]["weight"].dtype

    def fused(self, taps: mx.array) -> mx.array:
        """Fuse the target's states after layers `taps`, concatenated [n, L, taps * captured], to rows [n, L, H]."""
        return self["hidden_norm"](self["fc"](taps.astype(self.dtype)))

    def append(self, context: mx.array, caches: list[Any]) -> None:
        """Write keys and values of context rows [n, L, H] to each layer's cache; its position advances by L."""
        for layer, kv in zip(self.layers, caches, strict=True):
            layer.self_attn.append(context, kv, self.rope)

    def __call__(
        self, embeddings: mx.array, caches: list[Any], context: mx.array | None = None, last: mx.array | None = None
    ) -> mx.array:
        """Return normed output rows of a block [n, b, H], which begins at the caches' position.

        context: context rows [n, R, H] to append first, or None. last: int32 [n], the index of each sequence's last
        accepted context row, after which the block begins. Keys and values of the block's rows are written, too; the
        caches are then after the block's end: seek back before anything else is written.
        """
        x = embeddings.astype(self.dtype)
        x = x if self.shape.embed_scale == 1 else x * self.shape.embed_scale
        place, rope = BlockPlace.of(caches[0].offset, x.shape[1], context, last), self.rope
        for layer, kv in zip(self.layers, caches, strict=True):
            x = layer(x, kv, rope, place)
        return self["norm"](x)

    def token(self: Any, row: mx.array) -> mx.array:
        """Translate row indices of its LM head to the target's tokens; unchanged if it has no `d2t`."""
        return row + mx.take(self.d2t, row) if "d2t" in self else row
