"""Choose the experts that rows of router logits visit, their weights, and the pairs in the order of experts."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx

from ._source import DTYPES, launch

MOST_EXPERTS, MOST_TOP_K, MOST_ROWS = 512, 32, 16
FEW_ROWS = 8  # for which kernels have memory of their own size
LANES = 32


@dataclass(frozen=True)
class Routing:
    """How a family turns logits into experts and weights.

    kind "sigmoid": in float32; a bias takes part in the selection only; of `n_group` groups the `topk_group` with the
    greatest sums of their two best stay, and the scores of the others count as 0. "softmax": rounded to the logits'
    type, also when divided by their sum. `norm` divides by the sum plus `eps`; `scale` multiplies last. Raises
    ValueError for what no router does.
    """

    kind: str
    top_k: int
    n_group: int = 1
    topk_group: int = 1
    norm: bool = True
    eps: float = 0.0
    scale: float = 1.0

    def __post_init__(self):
        if self.kind not in ("sigmoid", "softmax"):
            raise ValueError(f"kind is {self.kind!r}; it must be 'sigmoid' or 'softmax'")
        if self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; it must be at least 1")
        if not 1 <= self.topk_group <= self.n_group:
            raise ValueError(
                f"topk_group is {self.topk_group}; it must be from 1 to n_group, which is {self.n_group}"
            )
        if self.kind == "softmax" and (self.n_group, self.eps, self.scale) != (1, 0.0, 1.0):
            raise ValueError("softmax routing has no groups, eps or scale")

    @cached_property
    def sizes(self) -> mx.array:
        return mx.array([self.top_k, self.n_group, self.topk_group, int(self.norm)], mx.int32)

    @cached_property
    def numbers(self) -> mx.array:
        return mx.array([self.eps, self.scale], mx.float32)

    def check(self, experts: int) -> None:
        """Raise ValueError where so many experts cannot be selected from like this."""
        if self.top_k > experts:
            raise ValueError(f"top_k is {self.top_k}; there are {experts} experts")
        if self.n_group > 1 and (experts % self.n_group or experts < 2 * self.n_group):
            raise ValueError(
                f"n_group is {self.n_group}; groups of equal size, at least 2, cannot hold {experts} experts"
            )


class Pairs(NamedTuple):
    """The (row, expert) pairs, by expert and then by row; see kernels/moe_route.metal."""

    tokens: mx.array
    weights: mx.array
    experts: mx.array
    starts: mx.array
    places: mx.array


def route_ref(logits: mx.array, routing: Routing, bias: mx.array | None) -> tuple[mx.array, mx.array]:
    """Route logits [M, E]: experts [M, top_k], their weights in float32, best first, equal ones in MLX's order."""
    k = routing.top_k
    if routing.kind == "softmax":
        scores = mx.softmax(logits, axis=-1, precise=True)
        experts = mx.argsort(scores, axis=-1)[..., -k:][..., ::-1]
        weights = mx.take_along_axis(scores, experts, axis=-1)
        if routing.norm:
            total = weights.astype(mx.float32).sum(axis=-1, keepdims=True)
            weights = weights / total.astype(weights.dtype)
        return experts, weights.astype(mx.float32)
    scores = mx.sigmoid(logits.astype(mx.float32))
    experts = mx.argsort(-_kept(scores if bias is None else scores + bias, routing), axis=-1)[..., :k]
    weights = mx.take_along_axis(scores, experts, axis=-1)
    if routing.norm:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + routing.eps)
    return experts, weights * routing.scale


def _kept(scores: mx.array, routing: Routing) -> mx.array:
    """The scores, 0 where their group is not among the best."""
    if routing.n_group == 1:
        return scores
    groups = scores.reshape(*scores.shape[:-1], routing.n_group, -1)
    order = mx.argsort(mx.sort(groups, axis=-1)[..., -2:].sum(axis=-1), axis=-1)
    rank = mx.argsort(order, axis=-1)[..., None]
    return mx.where(rank < routing.n_group - routing.topk_group, 0.0, groups).reshape(scores.shape)


def routable(logits: mx.array, routing: Routing) -> bool:
    """Tell whether the kernel takes these logits [M, E]."""
    m, experts = logits.shape
    fits = 1 <= m <= MOST_ROWS and experts <= MOST_EXPERTS and routing.top_k <= MOST_TOP_K
    return logits.dtype in DTYPES and fits and routing.n_group <= LANES


def room(m: int, top_k: int) -> int:
    """Choose for how many pairs of m rows a group of threads has memory: one size for few rows, one for more."""
    return 128 * -(-(FEW_ROWS if m <= FEW_ROWS else MOST_ROWS) * top_k // 128)


def route_metal(logits: mx.array, routing: Routing, bias: mx.array | None) -> Pairs:
    """Route logits [M, E] to their pairs, in one launch."""
    m, experts = logits.shape
    pairs = (m * routing.top_k,)
    integers = pairs, mx.int32
    inputs = {"logits": logits, "bias": logits if bias is None else bias}
    inputs |= {"sizes": routing.sizes, "numbers": routing.numbers}
    outputs = {"tokens": integers, "weights": (pairs, mx.float32), "experts": integers}
    outputs |= {"starts": ((pairs[0] + 1,), mx.int32), "places": integers}
    template: dict[str, object] = {"T": logits.dtype, "SOFTMAX": routing.kind == "softmax"}
    template |= {"BIASED": bias is not None, "VALUES": 4 * -(-experts // 128), "PAIRS": room(m, routing.top_k)}
    threads = (LANES, m, 1)
    return Pairs(*launch("moe_route", inputs, outputs, template=template, grid=threads, group=threads))
