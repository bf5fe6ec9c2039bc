"""Route rows of router logits to experts: choose experts and weights, and sort the pairs by expert."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import mlx.core as mx

from ._source import DTYPES, constants, launch

MOST_EXPERTS, MOST_TOP_K, MOST_ROWS = 512, 32, 16
FEW_ROWS = 8  # up to this number of rows kernels have less memory
LANES = 32


@dataclass(frozen=True)
class Routing:
    """How a model family converts router logits to `top_k` experts per row and their weights.

    kind "sigmoid": in float32; a bias only affects the selection; of `n_group` groups the `topk_group` with the
    greatest sums of their two best scores stay, other scores count as 0. "softmax": rounded to the logits' type, also
    after the division by the sum. `norm` divides by the sum of the chosen ones plus `eps`; `scale` multiplies
    last. Raises ValueError for another kind, top_k < 1, topk_group outside 1 to n_group, and groups, eps or scale
    with "softmax".
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
            allowed = f"from 1 to n_group, which is {self.n_group}"
            raise ValueError(f"topk_group is {self.topk_group}; it must be {allowed}")
        if self.kind == "softmax" and (self.n_group, self.eps, self.scale) != (1, 0.0, 1.0):
            raise ValueError("softmax routing has no groups, eps or scale; keep their defaults")

    @cached_property
    def sizes(self) -> mx.array:
        return constants(mx.int32, self.top_k, self.n_group, self.topk_group, int(self.norm))

    @cached_property
    def numbers(self) -> mx.array:
        return constants(mx.float32, self.eps, self.scale)

    def check(self, experts: int) -> None:
        """Raise ValueError if top_k exceeds `experts`, or they cannot form n_group > 1 equal groups of at least 2."""
        if self.top_k > experts:
            raise ValueError(f"top_k is {self.top_k}; there are {experts} experts, so it must be at most {experts}")
        if self.n_group > 1 and (experts % self.n_group or experts < 2 * self.n_group):
            groups = f"groups of equal size, at least 2, cannot hold {experts} experts"
            raise ValueError(f"n_group is {self.n_group}; {groups}")


class Pairs(NamedTuple):
    """The P = M * top_k pairs (row, expert), sorted by expert, then by row: int32, but weights float32.

    tokens, weights [P]: each pair's row and weight. experts [P], starts [P + 1]: the distinct experts and where the
    pairs of each start; -1 and P after the last. places [P]: where each row's pairs are, row by row.
    """

    tokens: mx.array
    weights: mx.array
    experts: mx.array
    starts: mx.array
    places: mx.array


def route_ref(logits: mx.array, routing: Routing, bias: mx.array | None) -> tuple[mx.array, mx.array]:
    """Return the experts [M, top_k] of logits [M, E], best first, and their weights, float32 [M, top_k].

    bias [E] or None; ignored with "softmax". Equal scores are in the order of MLX's argsort.
    """
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
    """Return the scores [..., E], with 0 in the groups that the routing does not select."""
    if routing.n_group == 1:
        return scores
    groups = scores.reshape(*scores.shape[:-1], routing.n_group, -1)
    order = mx.argsort(mx.sort(groups, axis=-1)[..., -2:].sum(axis=-1), axis=-1)
    rank = mx.argsort(order, axis=-1)[..., None]
    return mx.where(rank < routing.n_group - routing.topk_group, 0.0, groups).reshape(scores.shape)


def routable(logits: mx.array, routing: Routing) -> bool:
    """Return whether the kernel supports the type of logits [M, E], and M, E, top_k and n_group are within limits."""
    m, experts = logits.shape
    fits = 1 <= m <= MOST_ROWS and experts <= MOST_EXPERTS and routing.top_k <= MOST_TOP_K
    return logits.dtype in DTYPES and fits and routing.n_group <= LANES


def room(m: int, top_k: int) -> int:
    """Return the number of pairs for which a threadgroup reserves memory: top_k times 8 if m <= 8, else times 16.

    The number is rounded up to a multiple of 128.
    """
    return 128 * -(-(FEW_ROWS if m <= FEW_ROWS else MOST_ROWS) * top_k // 128)


def route_metal(logits: mx.array, routing: Routing, bias: mx.array | None) -> Pairs:
    """Return the (row, expert) pairs of logits [M, E], from one launch; they must be `routable`."""
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
