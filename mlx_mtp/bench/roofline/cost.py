"""Cost a pass on a chip: bytes from memory and instructions of every operation, launches, and seconds.

An operation takes form(bytes / usable bandwidth, instructions / usable issue rate), see FORMS; a pass takes their sum
over all layers, plus its launches. An instruction is one that a lane of a GPU core issues (a fused multiply-add is
one); the peak issue rate is fp32 TFLOPS / 2. Instructions per weight are counted in the kernels' inner loops, not
fitted.

Bytes: stock MLX reads an expert once for each token that visits it, ours each visited expert once. Weights and KV are
read from memory once per pass on either side; caches serve repeated requests of a launch. The costs of our kernels
are a plan until a Mac has timed them.

Launches are counted in recorded graphs: `python -m bench.launches --out mlx_mtp/bench/roofline/launches.csv` writes
`launches.csv`. Operations that mx.compile fuses are one. A launch costs more if it waits for an earlier one, as MLX's
barriers decide; both costs depend on the chip (`chips.csv`). Launches of no counted layer are taken to wait.
"""

import csv
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ...kernels._matrix import ROWS_ONCE, SIDE, TWIN_ROWS
from .chips import Chip
from .ops import AttentionOp, ExpertsOp, LatentOp, LinearOp, ModelOps, Op, StateOp

FORMS: dict[str, Callable] = {
    "max": np.maximum,  # full overlap
    "max + a third": lambda a, b: np.maximum(a, b) + np.minimum(a, b) / 3,  # two thirds of the shorter overlap
    "root of squares": np.hypot,  # less overlap the closer they are
    "sum": np.add,  # no overlap
}
FORM = "max + a third"

# Instructions per weight: (once for all rows that share it, per row). Loads are not counted.
QMV = 0.0, 3.94  # mask, convert, multiply-add; per 4 outputs of x: convert, scale, sum; 3 per 16 weights
WIDE = 3.0, 2.125  # mask, convert, scale; per row: convert x, multiply-add, 1 per chunk of 8
OURS, OURS_MANY = (2.0, 1.94), (2.0, 2.69)  # QMV with mask and convert once; x for 2 outputs from 7 rows on
# Our kernels of GGUF's block formats, for one row, too. Once: extract a code, convert, at 4 bits a polynomial.
# Per row: multiply-add, x for 4 outputs, scale. Without them: bytes, and launches, of a dequantization.
BLOCKS, PIECES, PIECE_LAUNCHES = {4: (8.0, 1.4), 6: (5.0, 1.4)}, 22, 10
WIDE_ROWS, OURS_ROWS = 5, 8  # maximum rows that share reads and decoding
# In the lane "matrix", for all rows, counted by `python -m bench.instructions`: of twins at 1 to TWIN_ROWS rows, then
# of matrices at 8 and 16 without their products. Counted alike, QMV is 4.42.
LANES = "exact", "matrix"
MATRIX_LANE = {
    "affine 4": (3.62, 5.88, 7.75, 3.46, 4.65),
    "iq4_xs": (8.62, 10.58, 12.25, 8.46, 9.34),
    "q6_k": (5.01, 7.09, 8.79, 6.22, 7.59),
    "bfloat16": (2.43, 4.36, 1.56, 1.56, 2.06),  # three rows by matrices
}
TILE_ROWS, MATRIX = 32, 0.8  # rows that matrix kernels pad to; simdgroup_matrix's share of the multiply-add rate

# Instructions per cached value, query head and row: converts, multiply-adds, sums over lanes, rescaling.
SDPA, SDPA_OURS = 3.6, 2.6  # our kernel converts a value once for all rows and heads
GEMV = 2.125  # per row of a product with 16-bit values
SCORES = 12  # bytes of traffic per score of unfused attention: 6 passes in 16 bits

UNFUSED_LAUNCHES, EXPANDED_LAUNCHES = 3, 2  # in addition to a layer's: attention in parts; latents expanded to heads
STEP_LAUNCHES = 3  # per pass in addition to its layers: embedding, last norm, head
DRAFT_LAUNCHES = 16  # per draft in addition to its head's block: norms, choice, bookkeeping; 14 to 22 were counted

# Kernels that replace stock MLX, by the part of a pass that they change.
KERNELS = {
    "products": ("verify_qmm", "verify_glu", "verify_gemv", "verify_qmm_heads"),
    "experts": ("verify_moe",),
    "attention": ("verify_attention", "verify_latent_attention"),
    "recurrence": ("gated_delta_verify", "mamba2_verify"),
    "head": ("verify_head",),
    "norms": ("norm_rope", "add_norm"),
}
ALL = frozenset(KERNELS)

FILE = Path(__file__).with_name("launches.csv")
# By kind of layer and active kernels ("none", a kind of KERNELS, "all"): launches at one row, and at more.
# WAITS: those of them that wait for an earlier one.
LAUNCHES: dict[str, dict[str, tuple[int, int]]] = {}
WAITS: dict[str, dict[str, tuple[int, int]]] = {}
for _line in csv.DictReader(FILE.read_text().splitlines()[1:]):
    if _line["kind"]:
        for _table, _end in ((LAUNCHES, ""), (WAITS, "_waits")):
            _pair = int(_line[f"one_row{_end}"]), int(_line[f"more_rows{_end}"])
            _table.setdefault(_line["kind"], {})[_line["kernels"]] = _pair


@dataclass(frozen=True)
class PassShape:
    """The conditions of a pass: m rows after `context` tokens, with the kinds of our kernels in `on`, else stock MLX.

    overlap: similarity of the rows' experts, one of OVERLAPS. mlx: MLX's version, which decides its kernels. lane: of
    our products, one of LANES.
    """

    m: int
    on: frozenset[str] = frozenset()
    context: int = 4096
    overlap: str = "independent"
    mlx: float = 0.32
    caches: bool = True  # whether caches serve repeated requests of a launch; else memory does
    lane: str = "exact"


class Cost(NamedTuple):
    """An operation's bytes, instructions, number of requests for the bytes, and launches not counted in its layer."""

    name: str
    nbytes: float
    instructions: float
    requests: float = 1
    launches: float = 0


def launches(kind: str, on: Collection[str], rows: int) -> np.ndarray:
    """Return the number of launches of a layer, and of those that wait for none. kind: a row of launches.csv.

    on: no kind of KERNELS, a single one, or all; KeyError for another number of kinds.
    """
    name = "none" if not on else "all" if set(on) >= ALL else "".join(on)
    counted, waiting = (table[kind][name][int(rows > 1)] for table in (LAUNCHES, WAITS))
    return np.array([counted, counted - waiting])


def tile(chip: Chip) -> float:
    """Return instructions per weight of a product padded to a tile, at the matrix units' rate (`issue` cancels)."""
    return TILE_ROWS / MATRIX * chip.issue / (4 if chip.generation >= 17 else 1)  # M5's units are four times as fast


def batch_limit(chip: Chip, n: int, k: int) -> int:
    """Return the number of rows from which MLX uses its matrix kernels for quantized weights [n, k]."""
    size = 0 if max(n, k) <= 2048 else 1 if max(n, k) <= 4096 else 2
    if "Ultra" in chip.name:
        return (32, 18, 12)[size]
    return {17: (33, 25, 13), 16: (13, 15, 13), 15: (13, 15, 13)}.get(chip.generation, (14, 10, 6))[size]


def linear(op: LinearOp, at: PassShape, chip: Chip) -> Cost:
    """Return a product's Cost: the kernel decides how often weights are requested and the instructions per weight."""
    ours = ("head" if op.name == "lm_head" else "products") in at.on
    if ours and at.lane == "matrix":
        return in_matrix_lane(op, at.m, chip)
    if op.group is None:  # unquantized: one row at a time, or in stock MLX a padded tile from two rows on
        counted = GEMV * at.m if ours or at.m == 1 else tile(chip)
        return Cost(op.name, op.nbytes, op.weights * counted)
    if op.packed:
        return packed(op, at, op.nbytes, op.weights, ours=ours)
    once, each, passes = *QMV, at.m
    if at.m > 1 and ours:
        once, each, passes = *(OURS if at.m <= 6 else OURS_MANY), ceil(at.m / OURS_ROWS)
    elif at.m >= batch_limit(chip, op.n, op.k):
        once, each, passes = WIDE[0] + tile(chip), 0.0, 1
    elif at.m > 1 and chip.generation >= 15 and at.mlx >= 0.32:
        once, each, passes = *WIDE, ceil(at.m / WIDE_ROWS)
    return Cost(op.name, op.nbytes, op.weights * (passes * once + at.m * each), passes)


def in_matrix_lane(op: LinearOp, rows: int, chip: Chip) -> Cost:
    """Return the Cost of a product in the lane "matrix", by simdgroup_matrix: M5's tensor units are not used.

    Weights of other bits and 4-bit floats count as affine ones of 4 bits, and rows above TWIN_ROWS, unquantized above
    two, in octets.
    """
    name = "bfloat16" if op.group is None else "affine 4" if not op.packed else "iq4_xs" if op.bits < 5 else "q6_k"
    if rows <= TWIN_ROWS - (op.group is None):
        return Cost(op.name, op.nbytes, op.weights * MATRIX_LANE[name][rows - 1])
    octets, passes = ceil(min(rows, ROWS_ONCE) / SIDE), ceil(rows / ROWS_ONCE)
    counted = MATRIX_LANE[name][TWIN_ROWS + octets - 1] + octets * SIDE / MATRIX * chip.issue  # as in `tile`
    return Cost(op.name, op.nbytes, op.weights * passes * counted, passes)


def experts(op: ExpertsOp, at: PassShape, _: Chip) -> Cost:
    """Return the Cost of experts: with "experts" in `at.on` that of our kernel, else that of stock MLX.

    Our kernel reads each distinct expert once; stock MLX reads an expert for each (token, expert) pair.
    """
    pairs = at.m * op.top
    if op.packed:
        visited = op.visited(at.m, at.overlap) / op.nbytes if "experts" in at.on else pairs
        return packed(op, at, visited * op.nbytes, visited * op.weights, pairs / visited, ours="experts" in at.on)
    if "experts" not in at.on or at.m == 1:
        return Cost(op.name, pairs * op.nbytes, pairs * op.weights * QMV[1])
    nbytes = op.visited(at.m, at.overlap)
    visited = nbytes / op.nbytes
    return Cost(op.name, nbytes, op.weights * (visited * OURS[0] + pairs * OURS[1]))


def packed(
    op: LinearOp | ExpertsOp, at: PassShape, nbytes: float, weights: float, rows: float | None = None, *, ours: bool
) -> Cost:
    """Return the Cost of a product in a block format.

    ours: our kernel computes it, at one row, too; else weights are dequantized in pieces, and multiplied. nbytes,
    weights: bytes and number of the weights that are read. rows: of x per weight, by default those of the pass.
    """
    rows = at.m if rows is None else rows
    once, each = BLOCKS[4 if op.bits < 5 else 6]
    if not ours:
        counted = weights * (once + each * rows)
        return Cost(op.name, nbytes + PIECES * weights, counted, 1, PIECE_LAUNCHES)
    passes = ceil(rows / OURS_ROWS)
    return Cost(op.name, nbytes, weights * (passes * once + rows * each), passes)


def attention(op: AttentionOp, at: PassShape, chip: Chip) -> Cost:
    """Return the Cost of attention: of our kernel with "attention" in `at.on` and at.m > 1, else of stock MLX.

    Our kernel requests K and V of a KV head once. Stock MLX's fused kernel requests them for every row and query
    head, and supports rows x (query heads per KV head) up to 32. Beyond 32, stock MLX requests them for every query
    head, and scores pass through memory between a product with K (one row at a time from M3 on, else padded to a
    tile) and one with V (padded).
    """
    values, nbytes = op.values(at.context), op.cached(at.context)
    group = op.heads // op.kv
    if "attention" in at.on and at.m > 1:
        return Cost(op.name, nbytes, values * group * at.m * SDPA_OURS)
    if group * at.m <= 32:
        return Cost(op.name, nbytes, values * group * at.m * SDPA, group * at.m)
    scores = op.heads * at.m * min(at.context, op.window or at.context)
    counted = values * group * ((GEMV * at.m if chip.generation >= 15 else tile(chip)) + tile(chip)) / 2
    return Cost(op.name, nbytes + SCORES * scores, counted, group, UNFUSED_LAUNCHES)


def latent(op: LatentOp, at: PassShape, chip: Chip) -> Cost:
    """Return MLA's Cost: absorbed, all heads read the latent cache; mlx-lm expands it to heads from 2 rows on."""
    length, nbytes = op.length(at.context), op.cached(at.context)
    scores = op.heads * at.m * length * SCORES
    if "attention" in at.on or at.m == 1:
        counted = length * op.heads * (2 * op.rank + op.rope) * at.m * GEMV
        return Cost(op.name, nbytes + scores, counted)
    expanded = length * op.heads * (op.nope + op.value)
    counted = expanded * (op.rank * tile(chip) / TILE_ROWS + SDPA * at.m)
    return Cost(op.name, nbytes + 4 * expanded + scores, counted, 1, EXPANDED_LAUNCHES)


def state(op: StateOp, at: PassShape, _: Chip) -> Cost:
    """Return a state's Cost: read and written once; six instructions per row and 4-byte value."""
    return Cost(op.name, 2 * op.nbytes, op.nbytes / 4 * 6 * at.m)


COSTS: dict = {LinearOp: linear, ExpertsOp: experts, AttentionOp: attention, LatentOp: latent, StateOp: state}


def cost(op: Op, at: PassShape, chip: Chip) -> Cost:
    """Return the Cost of one operation in a pass."""
    return COSTS[type(op)](op, at, chip)


class PassCosts(NamedTuple):
    """A pass as arrays over its operations: number of each, bytes from memory, bytes requested, instructions.

    launches: of the pass. independent: number of them that wait for no earlier one.
    """

    names: list[str]
    count: np.ndarray
    nbytes: np.ndarray
    requested: np.ndarray
    instructions: np.ndarray
    launches: float
    independent: float

    def launch_seconds(self, chip: Chip) -> float:
        return (self.launches - self.independent) * chip.launch + self.independent * chip.independent


def collect(
    work: Iterable[tuple[int, Op, int]], at: PassShape, chip: Chip, launched: float, independent: float = 0
) -> PassCosts:
    """Return the costs of a pass, from (count, operation, rows) of its work.

    launched: launches of its layers, to which the operations' own launches are added. independent: of `launched`.
    """
    work = list(work)
    shapes = {rows: replace(at, m=rows) for rows in {rows for *_, rows in work}}
    lines = [(count, *cost(op, shapes[rows], chip)) for count, op, rows in work]
    counts, names, *columns = zip(*lines, strict=True)
    count, nbytes, instructions, requests, own = (np.array(column, float) for column in (counts, *columns))
    requested = nbytes * requests
    memory = nbytes if at.caches else requested
    launched = float(launched + count @ own)
    return PassCosts(list(names), count, memory, requested, instructions, launched, float(independent))


def of_model(model: ModelOps, at: PassShape, chip: Chip) -> PassCosts:
    """Return the costs of a pass of the target over `at.m` rows."""
    layers, apart = sum(layer.count * launches(layer.kind, at.on, at.m) for layer in model.layers) + np.zeros(2)
    return collect([(count, op, at.m) for count, op in model.ops()], at, chip, STEP_LAUNCHES + layers, apart)


def of_drafts(model: ModelOps, k: int, at: PassShape, chip: Chip) -> PassCosts:
    """Return the costs of k drafts after a verify of k + 1 rows; `at.m` is ignored."""
    passes = model.draft_passes(k)
    ops = [(head, op, rows) for head, rows in passes for op in (*head.block.ops, head.lm_head)]
    work = [(1, op, 1 if op is head.lm_head else rows) for head, op, rows in ops]
    launched, apart = sum(
        np.add((DRAFT_LAUNCHES, 0), launches(head.block.kind, at.on, rows)) for head, rows in passes
    ) + np.zeros(2)
    return collect(work, at, chip, launched, apart)


def of_op(op: Op, at: PassShape, chip: Chip) -> PassCosts:
    """Return the costs of one operation as a pass of its own: one launch, and those that the operation adds."""
    return collect([(1, op, at.m)], at, chip, 1)


def op_seconds(costs: PassCosts, chip: Chip, form: str = FORM) -> np.ndarray:
    """Return the predicted seconds of each operation, times its `count`, without launches. form: as in `seconds`."""
    return costs.count * FORMS[form](costs.nbytes / chip.bandwidth, costs.instructions / chip.rate)


def seconds(costs: PassCosts, chip: Chip, form: str = FORM) -> float:
    """Return the predicted seconds of a pass, including its launches.

    form: key in FORMS of the function that combines an operation's memory time and instruction time.
    """
    return float(op_seconds(costs, chip, form).sum()) + costs.launch_seconds(chip)
