"""Time of a pass on a chip: bytes from memory and instructions of every operation, and launches.

One operation: form(bytes / usable bandwidth, instructions / usable issue rate), see FORMS; a pass: their sum over
all layers, plus its launches. An instruction is what a lane of a GPU core issues, a fused multiply-add is one; the
peak issue rate is fp32 TFLOPS / 2. Instructions per weight are read off the kernels' inner loops, not fitted.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

import numpy as np
from roofline_models import Attention, Experts, Latent, Linear, Model, Op, State

FORMS: dict[str, Callable] = {
    "max": np.maximum,  # the two overlap fully
    "max + a third": lambda a, b: np.maximum(a, b) + np.minimum(a, b) / 3,  # a third of the shorter is not hidden
    "root of squares": np.hypot,  # they overlap the less the nearer they are
    "sum": np.add,  # no overlap
}
FORM = "max + a third"

# Instructions per weight: (once for the rows that share it, for each row). Loads are not counted.
QMV = 0.0, 3.94  # mask, convert, multiply-add; of x, for 4 outputs, convert, scale, sum; 3 more for 16 weights
WIDE = 3.0, 2.125  # mask, convert, scale; per row convert x, multiply-add, 1 for a chunk of 8
OURS, OURS_MANY = (2.0, 1.94), (2.0, 2.69)  # as QMV, mask and convert once; x for 2 outputs from 7 rows on
WIDE_ROWS, OURS_ROWS = 5, 8  # most rows that share what is read and decoded
TILE_ROWS, MATRIX = 32, 0.8  # rows that matrix kernels pad to; simdgroup_matrix's share of the multiply-add rate

# Instructions per cached value, query head and row: converts, multiply-adds, sums over lanes, rescaling.
SDPA, SDPA_OURS = 3.6, 2.6  # ours converts a value once for all rows and heads
GEMV = 2.125  # a row of a product with values in 16 bits
SCORES = 12  # bytes of traffic per score of unfused attention: 6 passes in 16 bits

# One launch on the GPU, 1.2 us (two reports), and its share of a command buffer: 20 us for 50. Not fitted.
LAUNCH = 1.2e-6 + 20e-6 / 50
UNFUSED_LAUNCHES = 3

# Launches of one layer: stock MLX, ours for one row, ours for more; as `bench/launches.py --out` has counted them.
COUNTED = Path(__file__).parent / "results" / "launches.json"
KINDS = {
    "step dense": ("Step-3.5-Flash", "dense, sliding"),
    "step experts": ("Step-3.5-Flash", "experts, sliding"),
    "glm dense": ("GLM-4.5", "dense"),
    "glm experts": ("GLM-4.5", "experts"),
    "qwen delta": ("Qwen3.6-27B", "gated delta"),
    "qwen attention": ("Qwen3.6-27B", "attention"),
    "qwen delta experts": ("Qwen3.6-35B-A3B", "gated delta, experts"),
    "qwen attention experts": ("Qwen3.6-35B-A3B", "attention, experts"),
    "deepseek dense": ("DeepSeek-V3", "dense"),
    "deepseek experts": ("DeepSeek-V3", "experts"),
}


def counted_launches() -> dict[str, tuple[int, int, int]]:
    operations = json.loads(COUNTED.read_text())["operations"]
    found = {kind: operations[model][layer] for kind, (model, layer) in KINDS.items()}
    return {kind: (layer["stock"][1], *layer["kernels"]) for kind, layer in found.items()}


LAUNCHES = counted_launches()

# A published count of real routing, 39 distinct of 64 visits at 8 rows of 8 of 256 experts, is as if rows drew from
# this share of all experts.
OBSERVED_POOL = 0.2105


@dataclass(frozen=True)
class Chip:
    """Its figures, and the two shares that are fitted: of the bandwidth, and of the issue rate."""

    name: str
    generation: int
    gbps: float
    tflops: float
    memory: int  # GB at most
    usable: float = 0.85  # of the bandwidth, where nothing is published
    issue: float = 1.0

    @property
    def bandwidth(self) -> float:
        return self.gbps * 1e9 * self.usable

    @property
    def rate(self) -> float:
        return self.tflops * 1e12 / 2 * self.issue

    @property
    def tile(self) -> float:
        """Instructions per weight of a product padded to a tile, at the matrix units' own rate (`issue` cancels)."""
        return TILE_ROWS / MATRIX * self.issue / (4 if self.generation >= 17 else 1)  # M5's have four times the rate

    @property
    def family(self) -> str:
        """From M3 on integer and float instructions issue side by side."""
        return "M3 and later" if self.generation >= 15 else "M1 and M2"

    @property
    def ultra(self) -> bool:
        return "Ultra" in self.name


# The middle of a range of clocks or estimates; fewer cores in proportion; `usable` where one is published; the most
# memory sold.
CHIPS = {
    chip.name: chip
    for chip in (
        *(Chip("M1", 13, 68, 2.6, 16), Chip("M1 Pro", 13, 200, 5.3, 32), Chip("M1 Max", 13, 400, 10.6, 64)),
        *(Chip("M1 Ultra", 13, 800, 21.2, 128, 680 / 800), Chip("M2", 14, 100, 3.6, 24)),
        *(Chip("M2 Pro", 14, 200, 6.8, 32), Chip("M2 Max", 14, 400, 13.6, 96), Chip("M2 Ultra", 14, 800, 27.2, 192)),
        *(Chip("M3", 15, 100, 3.85, 24), Chip("M3 Pro", 15, 150, 6.9, 36), Chip("M3 Max 30c", 15, 300, 11.5, 96)),
        *(Chip("M3 Max 40c", 15, 400, 15.3, 128), Chip("M3 Ultra", 15, 819, 28, 512, 692 / 819)),
        *(Chip("M4", 16, 120, 4.45, 32), Chip("M4 Pro", 16, 273, 9.2, 64), Chip("M4 Max 32c", 16, 410, 14.7, 36)),
        *(Chip("M4 Max 40c", 16, 546, 18.4, 128), Chip("M5", 17, 153, 4.2, 32, 122 / 153)),
        *(Chip("M5 Pro", 17, 307, 8.5, 64, 266 / 307), Chip("M5 Max 32c", 17, 460, 13.6, 128)),
        Chip("M5 Max 40c", 17, 614, 17, 128),
    )
}


@dataclass(frozen=True)
class Pass:
    """M rows, by stock MLX or by ours, after `context` tokens; `shared` routing is that of neighbouring tokens."""

    m: int
    ours: bool = False
    context: int = 4096
    shared: bool = False
    mlx: float = 0.32
    caches: bool = True  # serve what a launch requests more than once; else memory does


class Cost(NamedTuple):
    """Of one operation: bytes, instructions, how often its launch requests the bytes, launches its layer lacks."""

    name: str
    nbytes: float
    instructions: float
    requests: float = 1
    launches: float = 0


def distinct(total: int, top: int, rows: int, shared: bool = False) -> float:
    """Expected distinct experts that `rows` tokens visit: pool x (1 - (1 - top / pool)^rows).

    Independent: the pool is all experts. Shared: OBSERVED_POOL of them, never fewer than `top`.
    """
    pool = max(top, OBSERVED_POOL * total) if shared else total
    return pool * (1 - (1 - top / pool) ** rows)


def batch_limit(chip: Chip, n: int, k: int) -> int:
    """Rows from which MLX takes its matrix kernels."""
    size = 0 if max(n, k) <= 2048 else 1 if max(n, k) <= 4096 else 2
    if chip.ultra:
        return (32, 18, 12)[size]
    return {17: (33, 25, 13), 16: (13, 15, 13), 15: (13, 15, 13)}.get(chip.generation, (14, 10, 6))[size]


def linear(op: Linear, at: Pass, chip: Chip) -> Cost:
    """The kernel that is chosen, how often it requests the weights, and its instructions for each of them."""
    once, each, passes = *QMV, at.m
    if at.m > 1 and at.ours:
        once, each, passes = *(OURS if at.m <= 6 else OURS_MANY), ceil(at.m / OURS_ROWS)
    elif at.m >= batch_limit(chip, op.n, op.k):
        once, each, passes = WIDE[0] + chip.tile, 0.0, 1
    elif at.m > 1 and chip.generation >= 15 and at.mlx >= 0.32:
        once, each, passes = *WIDE, ceil(at.m / WIDE_ROWS)
    return Cost(op.name, op.nbytes, op.weights * (passes * once + at.m * each), passes)


def experts(op: Experts, at: Pass) -> Cost:
    """Stock: every (token, expert) pair reads its expert. Ours: every distinct expert once."""
    pairs = at.m * op.top
    if not at.ours or at.m == 1:
        return Cost(op.name, pairs * op.nbytes, pairs * op.weights * QMV[1])
    visited = distinct(op.total, op.top, at.m, at.shared)
    return Cost(op.name, visited * op.nbytes, op.weights * (visited * OURS[0] + pairs * OURS[1]))


def attention(op: Attention, at: Pass, chip: Chip) -> Cost:
    """K and V of each KV head: stock MLX requests them for every query head and row, ours once.

    Stock MLX's fused kernel takes rows x (query heads of a KV head) up to 32. Else scores go through memory, between
    a product with K (a row at a time from M3 on, else padded to a tile) and one with V (padded).
    """
    length = min(at.context, op.window or at.context)
    values = 2 * length * op.kv * op.dim  # 2 bytes each
    group = op.heads // op.kv
    if at.ours and at.m > 1:
        return Cost(op.name, 2 * values, values * group * at.m * SDPA_OURS)
    if group * at.m <= 32:
        return Cost(op.name, 2 * values, values * group * at.m * SDPA, group * at.m)
    scores = op.heads * at.m * length
    counted = values * group * ((GEMV * at.m if chip.generation >= 15 else chip.tile) + chip.tile) / 2
    return Cost(op.name, 2 * values + SCORES * scores, counted, group, UNFUSED_LAUNCHES)


def latent(op: Latent, at: Pass, chip: Chip) -> Cost:
    """Absorbed: all heads read the latent cache. mlx-lm at 2 rows or more expands the whole cache to heads first."""
    nbytes, scores = 2 * at.context * (op.rank + op.rope), op.heads * at.m * at.context * SCORES
    if at.ours or at.m == 1:
        counted = at.context * op.heads * (2 * op.rank + op.rope) * at.m * GEMV
        return Cost(op.name, nbytes + scores, counted, 1, UNFUSED_LAUNCHES)
    expanded = at.context * op.heads * (op.nope + op.value)
    counted = expanded * (op.rank * chip.tile / TILE_ROWS + SDPA * at.m)
    return Cost(op.name, nbytes + 4 * expanded + scores, counted, 1, UNFUSED_LAUNCHES + 2)


def cost(op: Op, at: Pass, chip: Chip) -> Cost:
    match op:
        case Linear():
            return linear(op, at, chip)
        case Experts():
            return experts(op, at)
        case Attention():
            return attention(op, at, chip)
        case Latent():
            return latent(op, at, chip)
        case State():
            return Cost(op.name, 2 * op.nbytes, op.nbytes / 4 * 6 * at.m)  # decay, two sums and two updates a value


class Costs(NamedTuple):
    """A pass, as arrays over its operations: how many of each, bytes from memory, bytes requested, instructions."""

    names: list[str]
    count: np.ndarray
    nbytes: np.ndarray
    requested: np.ndarray
    instructions: np.ndarray
    launches: float


def collect(rows: list[tuple[int, Cost]], at: Pass, launches: float) -> Costs:
    """`launches` and those of the operations' own."""
    count, nbytes, requests, instructions, own = (
        np.array([float(x) for x in column])
        for column in zip(*((n, c.nbytes, c.requests, c.instructions, c.launches) for n, c in rows), strict=True)
    )
    requested = nbytes * requests
    memory = nbytes if at.caches else requested
    return Costs([c.name for _, c in rows], count, memory, requested, instructions, launches + float(count @ own))


def of_model(model: Model, at: Pass, chip: Chip) -> Costs:
    rows = [(1, cost(model.head, at, chip))]
    column = 0 if not at.ours else 1 if at.m == 1 else 2
    launches = 3.0  # embedding, last norm, head
    for layer in model.layers:
        rows += [(layer.count, cost(op, at, chip)) for op in layer.ops]
        launches += layer.count * LAUNCHES[layer.kind][column]
    return collect(rows, at, launches)


def of_op(op: Op, at: Pass, chip: Chip) -> Costs:
    return collect([(1, cost(op, at, chip))], at, 1)


def phases(costs: Costs, chip: Chip, form: str = FORM) -> np.ndarray:
    """Seconds of each operation, all of its kind together."""
    return costs.count * FORMS[form](costs.nbytes / chip.bandwidth, costs.instructions / chip.rate)


def seconds(costs: Costs, chip: Chip, form: str = FORM) -> float:
    return float(phases(costs, chip, form).sum()) + costs.launches * LAUNCH


def step_times(model: Model, chip: Chip, at: Pass, rows: range, form: str = FORM) -> dict[int, float]:
    """Seconds of a pass of each number of rows, the others of `at` as they are."""
    return {m: seconds(of_model(model, replace(at, m=m), chip), chip, form) for m in rows}
