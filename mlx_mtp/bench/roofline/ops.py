"""Describe what a forward pass of a model reads and multiplies: layers as lists of a few kinds of operations."""

from dataclasses import dataclass, replace
from typing import Any

# How alike tokens in a row choose their experts. A published count of real routing, 39 distinct of 64 visits at 8
# rows of 8 of 256 experts, is as if rows drew from this share of all experts.
OVERLAPS = ("independent", "published", "shared")
PUBLISHED_POOL = 0.2105


def distinct(total: int, top: int, rows: int, overlap: str = "independent") -> float:
    """Expect so many distinct experts to be visited by `rows` tokens: pool x (1 - (1 - top / pool)^rows).

    independent: the pool is all experts. published: PUBLISHED_POOL of them, never fewer than `top`. shared: all
    tokens choose the same.
    """
    pools = {"independent": total, "published": max(top, PUBLISHED_POOL * total), "shared": top}
    pool = pools[overlap]
    return pool * (1 - (1 - top / pool) ** rows)


@dataclass(frozen=True)
class LinearOp:
    """x [M, K] times weights [N, K]; group None: not quantized, else each has a scale and a bias of 16 bits."""

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
        return self.weights * (self.bits / 8 + (4 / self.group if self.group else 0))


@dataclass(frozen=True)
class ExpertsOp:
    """Gate, up and down (or as many matrices as there are) of `top` of `total` experts a token; bytes: of one."""

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
        return LinearOp(self.name, self.matrices * self.width, self.hidden, self.bits, self.group).nbytes

    def visited(self, rows: int, overlap: str) -> float:
        """Count the bytes of the distinct experts that `rows` tokens visit."""
        return distinct(self.total, self.top, rows, overlap) * self.nbytes


@dataclass(frozen=True)
class AttentionOp:
    """Rows of `heads` queries over the cache of `kv` heads; `value_bytes` of each number in it."""

    heads: int
    kv: int
    dim: int
    window: int | None = None
    name: str = "attention"
    value_dim: int | None = None
    value_bytes: float = 2

    def values(self, context: int) -> int:
        """Count keys and values together."""
        return min(context, self.window or context) * self.kv * (self.dim + (self.value_dim or self.dim))

    def cached(self, context: int) -> float:
        return self.values(context) * self.value_bytes


@dataclass(frozen=True)
class LatentOp:
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
class StateOp:
    """A recurrent state in float32, read and written once a pass whatever M is."""

    nbytes: int
    name: str = "state"


Op = LinearOp | ExpertsOp | AttentionOp | LatentOp | StateOp


@dataclass(frozen=True)
class LayerOps:
    kind: str  # a row of launches.csv
    count: int
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class DraftHeadOps:
    """A depth of the MTP heads: what joins its inputs and its block, and the LM head that it drafts with."""

    block: LayerOps
    lm_head: LinearOp


@dataclass(frozen=True)
class ModelOps:
    """A target and its draft heads; recycled: the one head is fed its own output for any further draft."""

    layers: tuple[LayerOps, ...]
    head: LinearOp
    drafts: tuple[DraftHeadOps, ...] = ()
    recycled: bool = False

    def ops(self) -> list[tuple[int, Op]]:
        """List (count, operation) of a pass of the target."""
        return [(1, self.head), *((layer.count, op) for layer in self.layers for op in layer.ops)]

    @property
    def shared_bytes(self) -> float:
        """Of weights that every step reads; the embedding is not among them."""
        return sum(count * op.nbytes for count, op in self.ops() if isinstance(op, LinearOp))

    @property
    def routed_bytes(self) -> float:
        """Of the experts that one token visits."""
        return sum(count * op.top * op.nbytes for count, op in self.ops() if isinstance(op, ExpertsOp))

    @property
    def total_bytes(self) -> float:
        """Of all weights but the draft heads'; the embedding is as large as the head."""
        routed = sum(count * op.total * op.nbytes for count, op in self.ops() if isinstance(op, ExpertsOp))
        return self.shared_bytes + self.head.nbytes + routed

    @property
    def max_drafts(self) -> int:
        """Of a cycle, as far as a verify of 8 rows goes."""
        return 7 if self.recycled else min(7, len(self.drafts))

    def draft_passes(self, k: int) -> list[tuple[DraftHeadOps, int]]:
        """List the passes of a draft head that draft k tokens, one each: (head, rows).

        As the decode loop has them: each of k depths reads the k + 1 rows of the last verify and the drafts before
        it; a recycled head reads one row more for each further draft.
        """
        if not 0 <= k <= self.max_drafts:
            raise ValueError(f"{k} drafts; allowed are 0 to {self.max_drafts}")
        if self.recycled:
            return [(self.drafts[0], k + 1 if depth == 0 else 1) for depth in range(k)]
        return [(head, k + 1 + depth) for depth, head in enumerate(self.drafts[:k])]

    def stored(self, bits: float, group: float | None, value_bytes: float) -> "ModelOps":
        """Give the same with all weights, and all values of the caches, in one format."""
        return _formatted(self, {"bits": bits, "group": group, "value_bytes": value_bytes})


def _formatted(part: Any, formats: dict[str, Any]) -> Any:
    """Replace every field of these names in a dataclass, and in those inside it."""
    if isinstance(part, tuple):
        return tuple(_formatted(inner, formats) for inner in part)
    if not isinstance(part, Op | LayerOps | DraftHeadOps | ModelOps):
        return part
    fields = {name: formats.get(name, _formatted(value, formats)) for name, value in vars(part).items()}
    return replace(part, **fields)
