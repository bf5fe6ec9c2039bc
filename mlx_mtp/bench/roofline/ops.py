"""Describe the reads and multiplications of a model's forward pass: layers as lists of operations."""

from dataclasses import dataclass, replace
from typing import Any

# Similarity of the experts of adjacent tokens. A published count of real routing, 39 distinct of 64 visits by 8 rows
# with 8 of 256 experts, matches rows that draw from this share of all experts.
OVERLAPS = ("independent", "published", "shared")
PUBLISHED_POOL = 0.2105


def distinct(total: int, top: int, rows: int, overlap: str = "independent") -> float:
    """Return the expected number of distinct experts for `rows` tokens: pool x (1 - (1 - top / pool)^rows).

    independent: the pool is all experts. published: PUBLISHED_POOL of them, at least `top`. shared: all tokens visit
        the same experts.
    """
    pools = {"independent": total, "published": max(top, PUBLISHED_POOL * total), "shared": top}
    pool = pools[overlap]
    return pool * (1 - (1 - top / pool) ** rows)


@dataclass(frozen=True)
class LinearOp:
    """x [M, K] times weights [N, K]; group None: not quantized, else each group has 32 bits of scales.

    packed: in one of GGUF's block formats, which only our kernels read.
    """

    name: str
    n: int
    k: int
    bits: float = 4
    group: float | None = 64
    packed: bool = False

    @property
    def weights(self) -> int:
        return self.n * self.k

    @property
    def nbytes(self) -> float:
        return self.weights * (self.bits / 8 + (4 / self.group if self.group else 0))


@dataclass(frozen=True)
class ExpertsOp:
    """Experts of which each token visits `top` of `total`; `weights` and `nbytes` are those of one expert.

    matrices: per expert, 3 with a gate, 2 without.
    """

    hidden: int
    width: int
    total: int
    top: int
    name: str = "experts"
    bits: float = 4
    group: float | None = 64
    matrices: int = 3
    packed: bool = False

    @property
    def weights(self) -> int:
        return self.matrices * self.hidden * self.width

    @property
    def nbytes(self) -> float:
        return LinearOp(self.name, self.matrices * self.width, self.hidden, self.bits, self.group).nbytes

    def visited(self, rows: int, overlap: str) -> float:
        """Return the bytes of the distinct experts that `rows` tokens visit."""
        return distinct(self.total, self.top, rows, overlap) * self.nbytes


@dataclass(frozen=True)
class AttentionOp:
    """Attention of rows of `heads` queries to a cache of `kv` heads; each number in it has `value_bytes` bytes.

    value_dim: of values, None: `dim`. window: number of positions that are read, None: all.
    """

    heads: int
    kv: int
    dim: int
    window: int | None = None
    name: str = "attention"
    value_dim: int | None = None
    value_bytes: float = 2

    def values(self, context: int) -> int:
        """Return the number of values in the cached keys and values that are read after `context` tokens."""
        return min(context, self.window or context) * self.kv * (self.dim + (self.value_dim or self.dim))

    def cached(self, context: int) -> float:
        return self.values(context) * self.value_bytes


@dataclass(frozen=True)
class LatentOp:
    """MLA's attention on a cache of rank + rope values per token, shared by all heads.

    top: number of positions that are read, selected by keys of `index` values each.
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
    """A recurrent state in float32, read and written once per pass at any M."""

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
    """One MTP head. block: the operations of its input projection and of its layer. lm_head: for its drafts."""

    block: LayerOps
    lm_head: LinearOp


@dataclass(frozen=True)
class ModelOps:
    """A target and its draft heads; recycled: a single head reads its own output for further drafts."""

    layers: tuple[LayerOps, ...]
    head: LinearOp
    drafts: tuple[DraftHeadOps, ...] = ()
    recycled: bool = False

    def ops(self) -> list[tuple[int, Op]]:
        """Return (count, operation) pairs of a pass of the target."""
        return [(1, self.head), *((layer.count, op) for layer in self.layers for op in layer.ops)]

    @property
    def shared_bytes(self) -> float:
        """Bytes of weights that every pass of the target reads; experts and the embedding are excluded."""
        return sum(count * op.nbytes for count, op in self.ops() if isinstance(op, LinearOp))

    @property
    def routed_bytes(self) -> float:
        """Bytes of the experts that one token visits."""
        return sum(count * op.top * op.nbytes for count, op in self.ops() if isinstance(op, ExpertsOp))

    @property
    def total_bytes(self) -> float:
        """Bytes of all weights of the target; the embedding counts like the LM head."""
        routed = sum(count * op.total * op.nbytes for count, op in self.ops() if isinstance(op, ExpertsOp))
        return self.shared_bytes + self.head.nbytes + routed

    @property
    def max_drafts(self) -> int:
        """Maximum drafts of a cycle: what the heads can make, at most 7."""
        return 7 if self.recycled else min(7, len(self.drafts))

    def draft_passes(self, k: int) -> list[tuple[DraftHeadOps, int]]:
        """Return the passes of draft heads for k drafts, one per draft, as (head, rows).

        ValueError for a k outside 0 to `max_drafts`.

        As in the decode loop, each of k depths reads the k + 1 rows of the last verify and the earlier drafts; a
        recycled head reads one more row for each further draft.
        """
        if not 0 <= k <= self.max_drafts:
            raise ValueError(f"{k} drafts; allowed are 0 to {self.max_drafts}")
        if self.recycled:
            return [(self.drafts[0], k + 1 if depth == 0 else 1) for depth in range(k)]
        return [(head, k + 1 + depth) for depth, head in enumerate(self.drafts[:k])]

    def with_fields(self, **fields: Any) -> "ModelOps":
        """Return these operations with all fields of these names replaced, such as bits and group of all weights."""
        return _formatted(self, fields)


def _formatted(part: Any, formats: dict[str, Any]) -> Any:
    """Return a copy of a dataclass with all fields of these names replaced, also in dataclasses nested in it.

    Of a tuple, return a tuple of such copies; any other value is returned unchanged.
    """
    if isinstance(part, tuple):
        return tuple(_formatted(inner, formats) for inner in part)
    if not isinstance(part, Op | LayerOps | DraftHeadOps | ModelOps):
        return part
    fields = {name: formats.get(name, _formatted(value, formats)) for name, value in vars(part).items()}
    return replace(part, **fields)
