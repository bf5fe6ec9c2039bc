"""Choose tokens in one pass over the LM head's weights, without writing logits.

A site is on for some row counts, initially none. For the others it chooses from the module's logits by the same
rules, so that the choice does not depend on the row count.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..kernels import Quantized, draw_ref, masked, splits, top_ref, verify_head, verify_head_draw, verify_head_top
from ..kernels.verify_head import greatest_logit, logits_ref
from .blocks import BlockEmbedding, BlockLinear, is_blocks, made_of
from .kernel_site import Site, format_of, known_format, quantized, rows_of
from .scaled import SCALE, ScaledLinear

Maybe = mx.array | None
Top = tuple[mx.array, mx.array, mx.array]
KINDS = (nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding, BlockLinear, BlockEmbedding)


class LMHeadSite(Site):
    """The site of an LM head or tied embedding that chooses tokens of hidden rows: greedy, drawn, or the n best."""

    op = "verify_head"
    own_bits = stock_exact = True  # its greedy choice is MLX's; its sums for a draw are not

    def __init__(self, module: Any):
        self.module, w = module, module.weight
        self.width, self.weights_read = w.shape[1], w.shape[0]
        self.kind = str(w.dtype).rpartition(".")[2]
        text = f"{w.shape[0]}x{w.shape[1]} {self.kind}"
        if isinstance(q := self.weights, Quantized):
            self.width, self.kind, text = q.k, q.kind, f"{q.ends[0]}x{q.k} {format_of(q)}"
        self.shape = text + (" with bias" if self.bias is not None else "")

    @property
    def weights(self) -> Quantized | mx.array:
        """The module's current weights."""
        return quantized(self.module) if "scales" in self.module else self.module.weight

    @property
    def bias(self) -> mx.array | None:
        return self.module.get("bias")

    def splits(self, rows: int) -> bool:
        return not self.matrix and isinstance(self.weights, Quantized) and splits(rows)

    def computed(self, x: mx.array, split: bool) -> list[mx.array]:
        return [verify_head(x, self.weights, self.bias, split=split)]

    def stock(self, x: mx.array) -> list[mx.array]:
        return [mx.argmax(self.logits(x), axis=-1).astype(mx.int32)]

    def tokens(self, x: mx.array, mask: Maybe = None, *, fused: bool) -> mx.array:
        """Return, for each row of x [M, K], the token of the greatest logit, int32 [M]. fused: run the kernel."""
        if fused:
            how = {"split": rows_of(x) in self.split, "matrix": self.matrix}
            return verify_head(x, self.weights, self.bias, mask=mask, **how)
        return mx.argmax(masked(self.logits(x), mask), axis=-1).astype(mx.int32)

    def logits(self, x: mx.array) -> mx.array:
        """Return the module's logits [M, n] for x [M, K]."""
        return logits_of(self.module, x)


class OwnHead(LMHeadSite):
    """An LM head with our kernel's bits (see `products.OwnStack`); trials compare the greatest logits, [M, 1]."""

    def computed(self, x: mx.array, split: bool) -> list[mx.array]:
        y = greatest_logit(x, self.weights, self.bias, split=split, matrix=self.matrix)
        return [y[:, None].astype(x.dtype)]

    def stock(self, x: mx.array) -> list[mx.array]:
        return [self.logits(x).max(axis=-1, keepdims=True)]

    def truth(self, x: mx.array) -> list[mx.array]:
        return [logits_ref(x.astype(mx.float32), self.weights, self.bias).max(axis=-1, keepdims=True)]


def logits_of(module: Any, x: mx.array) -> mx.array:
    """Return logits [..., n] for x [..., K] from an LM head or a tied embedding."""
    return module.as_linear(x) if hasattr(type(module), "as_linear") else module(x)


@dataclass(frozen=True)
class NormedRows:
    """Normed rows x [M, K] and the LM-head site that chooses their tokens."""

    head: LMHeadSite
    x: mx.array

    @property
    def fused(self) -> bool:
        """Whether the kernel chooses the tokens, without writing logits."""
        return rows_of(self.x) in self.head.rows

    @property
    def split(self) -> bool:
        """Whether the kernel splits the rows."""
        return rows_of(self.x) in self.head.split

    def greedy(self, mask: Maybe = None) -> mx.array:
        """Return the token of each row's greatest logit, int32 [M]; mask: of allowed tokens, int32 [M, words]."""
        return self.head.tokens(self.x, mask, fused=self.fused)

    def draw(self, key: mx.array, position: Any, temp: float, mask: Maybe = None) -> mx.array:
        """Draw each row's token at a temperature, int32 [M]; row i uses the noise of position + i under `key`."""
        if self.fused:
            more = {"mask": mask, "split": self.split, "matrix": self.head.matrix}
            return verify_head_draw(self.x, self.head.weights, key, position, temp, self.head.bias, **more)
        return draw_ref(masked(self.head.logits(self.x), mask), key, position, temp)

    def top(self, n: int) -> Top:
        """Return (each row's n greatest logits, their tokens, the logsumexp of all), as `kernels.verify_head_top`."""
        if self.fused:
            how = {"split": self.split, "matrix": self.head.matrix}
            return verify_head_top(self.x, self.head.weights, n, self.head.bias, **how)
        return top_ref(self.head.logits(self.x), n)


def place_heads(model: Any) -> list[LMHeadSite]:
    """Create a site, off, as `choice` of each LM head of the model and its MTP heads; return the sites.

    Tied embeddings count as LM heads, and a module shared by several gets one site. Modules whose class or format
    the kernels do not support get none.
    """
    found = {id(module): module for module in map(model.unembedding, (None, *range(len(model.mtp))))}
    served = [module for module in found.values() if isinstance(module, KINDS) and known_format(module)]
    sites = [OwnHead(m) if is_blocks(m) else LMHeadSite(m) for m in served]
    for site in sites:
        site.module.choice = site
    return sites


def sliced(module: Any, rows: mx.array) -> Any:
    """Return a linear layer of these weight rows of a linear layer or embedding; its products have the same bits."""
    part: Any = nn.Linear(1, 1, bias=False)
    if is_blocks(module):
        part = made_of(part, module.mode, module.weight, module.scales)
    elif "scales" in module:
        kind = ScaledLinear if SCALE in module else nn.QuantizedLinear
        part = kind(128, 1, False, module.group_size, module.bits, module.mode)  # 128: whole groups
    for name in ("weight", "scales", "biases", "bias"):
        if name in module:
            part[name] = module[name][rows]
    if SCALE in module:
        part[SCALE] = module[SCALE][rows] if module[SCALE].size > 1 else module[SCALE]
    return part


def head_on(module: Any) -> LMHeadSite | None:
    """Return the module's site if it is on for any row count, else None."""
    head = getattr(module, "choice", None)
    return head if head is not None and head.rows else None
