"""Layers whose weights stay in GGUF's block formats, IQ4_NL, IQ4_XS and Q6_K.

MLX's own operations do not support these. Where no kernel of ours runs, a product dequantizes its weights, a piece at
a time, and multiplies in float32; its result has the type of its input.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ..kernels import BLOCK_FORMATS, block_mode, block_product, dequantized_blocks, quantized_blocks

MOST_PAIRS = 512  # pairs of a row and an expert from which each expert's rows are found, instead of a copy per pair
PAIR_WEIGHTS = 1 << 22  # number of weights that are copied at a time
WORDS = mx.uint16  # of scales; no other format has scales of this type
_thread = threading.local()  # its `lazy` is True in a thread that is in `lazily`


@contextmanager
def lazily() -> Iterator[None]:
    """Context in which this thread's calls of experts evaluate nothing, as while MLX records a function."""
    _thread.lazy = True
    try:
        yield
    finally:
        _thread.lazy = False


class Blocks:
    """Mixin for a module in the block format that `mode` names: packed codes `weight`, uint16 words `scales`."""

    def dequantized(self: Any) -> mx.array:
        """Return all weights in float32."""
        return dequantized_blocks(self["weight"], self["scales"], self.mode)

    def to_quantized(self, **format_: Any) -> Any:
        """Return this module, whatever the format: mlx-lm's loader calls it for modules that config.json lists."""
        return self


class BlockLinear(Blocks, nn.QuantizedLinear):
    """A linear layer in a block format."""

    def __call__(self, x: mx.array) -> mx.array:
        y = block_product(x, self["weight"], self["scales"], self.mode)
        return y + self["bias"] if "bias" in self else y


class BlockEmbedding(Blocks, nn.QuantizedEmbedding):
    """An embedding in a block format; its rows have the type `dtype`."""

    def __call__(self, x: mx.array) -> mx.array:
        return dequantized_blocks(self["weight"][x], self["scales"][x], self.mode).astype(
            getattr(mx, str(self.dtype))
        )

    def as_linear(self, x: mx.array) -> mx.array:
        """Return the logits [..., N] of rows x [..., K], with the embedding as an LM head."""
        return block_product(x, self["weight"], self["scales"], self.mode)


class BlockMultiLinear(Blocks, QuantizedMultiLinear):
    """Per-head matrices [heads, N, K] in a block format."""

    def __call__(self, x: mx.array, transpose: bool = True) -> mx.array:
        """Return [..., heads, L, N] for x [..., heads, L, K]; without `transpose` [..., L, K] for x [..., L, N]."""
        return block_product(x, self["weight"], self["scales"], self.mode, transpose=transpose)


class BlockSwitchLinear(Blocks, QuantizedSwitchLinear):
    """Stacked experts in a block format."""

    @property
    def input_dims(self) -> int:
        return self.weight.shape[-1] * 32 // self.bits

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """Return outputs [*I, 1, N] of the experts `indices` [*I] for rows x, which are broadcast to [*I, 1, K].

        If there are more than MOST_PAIRS indices, these are evaluated, to group rows by expert, but not in `lazily`.
        sorted_indices has no effect.
        """
        k = x.shape[-1]
        pairs = mx.broadcast_to(x, (*indices.shape, 1, k)).reshape(-1, 1, k)
        chosen = indices.reshape(-1)
        few = chosen.size <= MOST_PAIRS or getattr(_thread, "lazy", False)
        y = self._by_pair(pairs, chosen) if few else self._by_expert(pairs, chosen)
        y = y.astype(x.dtype).reshape(*indices.shape, 1, -1)
        return y + mx.expand_dims(self["bias"][indices], -2) if "bias" in self else y

    def _by_pair(self, x: mx.array, chosen: mx.array) -> mx.array:
        """Return rows x [P, 1, K] times the matrices of experts `chosen` [P]: [P, 1, N]; copies a matrix per row."""
        size, found = max(PAIR_WEIGHTS // (self.output_dims * self.input_dims), 1), []
        for begin in range(0, len(chosen), size):
            at = chosen[begin : begin + size]
            if found:  # a piece is dequantized after the one before was used
                at = mx.depends(at, found[-1])
            rows = x[begin : begin + size]
            found.append(block_product(rows, self["weight"][at], self["scales"][at], self.mode))
        return found[0] if len(found) == 1 else mx.concatenate(found)

    def _by_expert(self, x: mx.array, chosen: mx.array) -> mx.array:
        """Return the result of `_by_pair`; each chosen expert is dequantized once, and `chosen` is evaluated."""
        order = mx.argsort(chosen)
        counts = (chosen[:, None] == mx.arange(self.num_experts)).sum(axis=0).tolist()
        rows, found, begin = x[order, 0], [], 0
        for expert, count in enumerate(counts):  # type: ignore[arg-type]
            if count:
                part = rows[begin : begin + count]
                part = mx.depends(part, found[-1]) if found else part
                found.append(block_product(part, self["weight"][expert], self["scales"][expert], self.mode))
                begin += count
        return mx.concatenate(found)[mx.argsort(order)][:, None]


KINDS: dict[type, type] = {
    nn.Linear: BlockLinear,
    nn.Embedding: BlockEmbedding,
    SwitchLinear: BlockSwitchLinear,
    MultiLinear: BlockMultiLinear,
}
PLAIN = {blocks: plain for plain, blocks in KINDS.items()}


def is_blocks(module: Any) -> bool:
    """Return whether a module's weights are in a block format."""
    return isinstance(module, Blocks)


def block_kind(module: Any) -> type | None:
    """Return the block-format class in KINDS for a module's own class, None if KINDS has none; bases do not count."""
    return KINDS.get(type(module))


def made_of(module: Any, mode: str, weight: mx.array, scales: mx.array, dtype: mx.Dtype = mx.float32) -> Any:
    """Return a frozen module with packed codes `weight`, uint16 words `scales`, and the bias of `module`, if any.

    module: the unquantized one that it replaces. mode: of the block format. dtype: of an embedding's rows.
    """
    kind: Any = KINDS[type(module)]
    made = kind.__new__(kind)
    nn.Module.__init__(made)
    made.bits, made.group_size, made.mode = *BLOCK_FORMATS[mode][:2], mode
    made.weight, made.scales = weight, scales
    if kind is BlockEmbedding:
        made.dtype = str(dtype).rpartition(".")[2]
    if "bias" in module:
        made.bias = module.bias
    made.freeze()
    return made


def to_blocks(module: Any, mode: str) -> Any:
    """Return an unquantized linear layer, embedding, stack of experts or of heads as a new module in a block format.

    mode: "iq4_nl", "iq4_xs" or "q6_k". ValueError for rows that are not whole blocks.
    """
    return made_of(module, mode, *quantized_blocks(module.weight, mode), module.weight.dtype)


def place_blocks(model: nn.Module, weights: dict[str, mx.array]) -> None:
    """Replace the unquantized modules whose scales in `weights` are uint16 words by those of the block format.

    The new modules contain zeros; `weights`, all of the model's by path, are loaded later. Rows of embeddings have
    the type of the first norm in `weights`, else float32. ValueError for a number of words that no block format has.
    """
    named = (w.dtype for path, w in weights.items() if path.endswith("norm.weight"))
    dtype, found = next(named, mx.float32), []
    for path, module in model.named_modules():
        scales, weight = weights.get(f"{path}.scales"), weights.get(f"{path}.weight")
        if scales is None or weight is None or scales.dtype != WORDS or block_kind(module) is None:
            continue
        mode = block_mode(module.weight.shape[-1], scales.shape[-1])
        if mode is None:
            formats = ", ".join(BLOCK_FORMATS)
            shape = f"{path}.scales has shape {scales.shape}, which no supported block format has"
            raise ValueError(f"{shape}; supported are {formats}")
        lead, k = module.weight.shape[:-1], module.weight.shape[-1]
        form = BLOCK_FORMATS[mode]
        shapes = (*lead, k * form.bits // 32), (*lead, k // form.span * form.words)
        found.append((path, made_of(module, mode, mx.zeros(shapes[0], mx.uint32), mx.zeros(shapes[1], WORDS), dtype)))
    model.update_modules(tree_unflatten(found))
