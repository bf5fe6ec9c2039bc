"""What one forward pass of a model reads and multiplies: layers as lists of a few kinds of operations."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

# How alike tokens in a row choose their experts. A published count of real routing, 39 distinct of 64 visits at 8
# rows of 8 of 256 experts, is as if rows drew from this share of all experts.
OVERLAPS = ("independent", "published", "shared")
PUBLISHED_POOL = 0.2105


def distinct(total: int, top: int, rows: int, overlap: str = "independent") -> float:
    """Expected distinct experts that `rows` tokens visit: pool x (1 - (1 - top / pool)^rows).

    independent: the pool is all experts. published: PUBLISHED_POOL of them, never fewer than `top`. shared: all
    tokens choose the same.
    """
    pools = {"independent": total, "published": max(top, PUBLISHED_POOL * total), "shared": top}
    pool = pools[overlap]
    return pool * (1 - (1 - top / pool) ** rows)


def packed(weights: float, bits: float, group: float | None) -> float:
    """Bytes of weights; where they are quantized, each group has a scale and a bias of 16 bits."""
    return weights * (bits / 8 + (4 / group if group else 0))


@dataclass(frozen=True)
class Linear:
    """x [M, K] times weights [N, K]; group None: not quantized."""

    name: str
    n: int
    k: int
    bits: float = 4
    group: float | None = 64

    @property
    def weights(self) -> int:
        return self.n * self.k

    @property
    def nbytes(self) -> float:
        return packed(self.weights, self.bits, self.group)


@dataclass(frozen=True)
class Experts:
    """Gate, up and down (or as many matrices as there are) of `top` of `total` experts for each token."""

    hidden: int
    width: int
    total: int
    top: int
    name: str = "experts"
    bits: float = 4
    group: float | None = 64
    matrices: int = 3

    @property
    def weights(self) -> int:
        return self.matrices * self.hidden * self.width

    @property
    def nbytes(self) -> float:
        return packed(self.weights, self.bits, self.group)

    def visited(self, rows: int, overlap: str) -> float:
        """Bytes of the distinct experts that `rows` tokens visit."""
        return distinct(self.total, self.top, rows, overlap) * self.nbytes


@dataclass(frozen=True)
class Attention:
    """Rows of `heads` queries over the cache of `kv` heads; `value_bytes` of each number in it."""

    heads: int
    kv: int
    dim: int
    window: int | None = None
    name: str = "attention"
    value_dim: int | None = None
    value_bytes: float = 2

    def values(self, context: int) -> int:
        """Of keys and values together."""
        return min(context, self.window or context) * self.kv * (self.dim + (self.value_dim or self.dim))

    def cached(self, context: int) -> float:
        return self.values(context) * self.value_bytes


@dataclass(frozen=True)
class Latent:
    """MLA's attention over a cache of rank + rope values a token, shared by all heads.

    top: of the positions before, only so many are read, chosen by keys of `index` values each.
    """

    heads: int
    rank: int
    rope: int
    nope: int
    value: int
    name: str = "attention"
    top: int | None = None
    index: int = 0
    value_bytes: float = 2

    def length(self, context: int) -> int:
        return min(context, self.top or context)

    def cached(self, context: int) -> float:
        return (self.length(context) * (self.rank + self.rope) + context * self.index) * self.value_bytes


@dataclass(frozen=True)
class State:
    """A recurrent state in float32, read and written once a pass whatever M is."""

    nbytes: int
    name: str = "state"


Op = Linear | Experts | Attention | Latent | State


@dataclass(frozen=True)
class Layer:
    kind: str  # a row of launches.csv
    count: int
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class DraftHead:
    """A depth of the MTP heads: what joins its inputs and its block, and the LM head that it drafts with."""

    block: Layer
    lm_head: Linear


@dataclass(frozen=True)
class Model:
    """recycled: the one draft head is fed its own output for any further draft."""

    layers: tuple[Layer, ...]
    head: Linear
    drafts: tuple[DraftHead, ...] = ()
    recycled: bool = False

    def linears(self) -> Iterable[tuple[int, Linear]]:
        yield 1, self.head
        for layer in self.layers:
            yield from ((layer.count, op) for op in layer.ops if isinstance(op, Linear))

    def experts(self) -> Iterable[tuple[int, Experts]]:
        for layer in self.layers:
            yield from ((layer.count, op) for op in layer.ops if isinstance(op, Experts))

    @property
    def shared_bytes(self) -> float:
        """Of weights that every step reads; the embedding is not among them."""
        return sum(count * op.nbytes for count, op in self.linears())

    @property
    def routed_bytes(self) -> float:
        """Of the experts that one token visits."""
        return sum(count * op.top * op.nbytes for count, op in self.experts())

    @property
    def total_bytes(self) -> float:
        """Of all weights but the draft heads'; the embedding is as large as the head."""
        routed = sum(count * op.total * op.nbytes for count, op in self.experts())
        return self.shared_bytes + self.head.nbytes + routed

    @property
    def max_drafts(self) -> int:
        """Of a cycle, as far as a verify of 8 rows goes."""
        return 7 if self.recycled else min(7, len(self.drafts))

    def draft_passes(self, k: int) -> list[tuple[DraftHead, int]]:
        """The passes of a draft head that draft k tokens, one each: (head, rows).

        As in `mlx_mtp/draft.py`: each of k depths reads the k + 1 rows of the last verify and the drafts before it; a
        recycled head reads one row more for each further draft.
        """
        if not 0 <= k <= self.max_drafts:
            raise ValueError(f"{k} drafts; allowed are 0 to {self.max_drafts}")
        if self.recycled:
            return [(self.drafts[0], k + 1 if depth == 0 else 1) for depth in range(k)]
        return [(head, k + 1 + depth) for depth, head in enumerate(self.drafts[:k])]

    def stored(self, bits: float, group: float | None, value_bytes: float) -> "Model":
        """The same with all weights, and all values of the caches, in one format."""
        return Model(
            tuple(_stored_layer(layer, bits, group, value_bytes) for layer in self.layers),
            _stored(self.head, bits, group),
            tuple(
                DraftHead(_stored_layer(head.block, bits, group, value_bytes), _stored(head.lm_head, bits, group))
                for head in self.drafts
            ),
            self.recycled,
        )


def _stored(op: Any, bits: float, group: float | None) -> Any:
    return replace(op, bits=bits, group=group)


def _stored_layer(layer: Layer, bits: float, group: float | None, value_bytes: float) -> Layer:
    ops = list(layer.ops)
    for i, op in enumerate(ops):
        if isinstance(op, Attention | Latent):
            ops[i] = replace(op, value_bytes=value_bytes)
        elif not isinstance(op, State):
            ops[i] = _stored(op, bits, group)
    return replace(layer, ops=tuple(ops))
