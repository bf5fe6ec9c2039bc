"""Validate the cost model: compare predicted with published times, on rows that it was not fitted to."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from mlx_mtp.bench.roofline.chips import Chip
from mlx_mtp.bench.roofline.cost import FORM, PassShape, of_model, of_op, seconds
from mlx_mtp.bench.roofline.models import MODELS
from mlx_mtp.bench.roofline.ops import AttentionOp

from .published import CONTEXT, PublishedPass, read_passes

Found = dict[str, Any]
WITHIN = 0.25
# Why a row may be off by more than 25%; without a reason it is a FAIL.
REASONS = {
    "spread": "the chip's shapes span 1.73-3.03 at M=8: the model has no shapes, and no number is within 25% of both",
}

# GB/s of the cache reached by stock MLX's attention: query heads, KV heads, width, context, rows; not fitted.
ATTENTION = (
    ("mlx#4076", "M5 Pro", (8, 1, 128), 8192, 1, 190),
    ("mlx#4380", "M5 Pro", (12, 1, 128), 8192, 1, 124),
    ("mlx#4380", "M5 Pro", (16, 1, 128), 8192, 1, 99),
    ("MTPLX", "M5 Max 40c", (24, 4, 256), 131072, 1, 387),
    ("MTPLX", "M5 Max 40c", (24, 4, 256), 131072, 4, 160),
    ("mlx#3837", "M1 Ultra", (32, 4, 256), 100000, 1, 178),
    ("mlx#3837", "M1 Ultra", (32, 4, 256), 100000, 2, 76),
)


def fitted_to(chip: str, rows: Iterable[PublishedPass]) -> int:
    """Return the number of published times of M <= 2 that a chip's two constants were fitted to."""
    used = [row for row in rows if row.chip == chip]
    timed = {(row.source, row.base) for row in used if row.base_ms and row.base <= 2}
    return sum(row.m <= 2 for row in used) + len(timed)


@dataclass(frozen=True)
class Prediction:
    """A published ratio and its prediction."""

    row: PublishedPass
    ratio: float

    @property
    def error(self) -> float:
        return self.ratio / self.row.ratio - 1

    @property
    def verdict(self) -> str:
        if abs(self.error) <= WITHIN:
            return "ok"
        return "unexplained: " + REASONS[self.row.reason] if self.row.reason else "FAIL"


def predict(
    rows: Iterable[PublishedPass], chips: dict[str, Chip], form: str = FORM, caches: bool = True
) -> list[Prediction]:
    """Predict every row's ratio on fitted chips."""
    made = []
    for row in rows:
        chip = chips[row.chip]
        times = [seconds(row.costs(m, chip, caches), chip, form) for m in (row.m, row.base)]
        made.append(Prediction(row, times[0] / times[1]))
    return made


def split(made: Iterable[Prediction]) -> tuple[list[Prediction], list[Prediction]]:
    """Split rows into those that were fitted (M <= 2) and the others."""
    made = list(made)
    return [p for p in made if p.row.m <= 2], [p for p in made if p.row.m > 2]


def errors(predictions: Iterable[Prediction]) -> tuple[float, float, int, int]:
    """Return the median and maximum error, the number of rows within 25%, and the number of rows."""
    found = [abs(p.error) for p in predictions]
    return median(found), max(found), sum(e <= WITHIN for e in found), len(found)


def validation(rows: Sequence[PublishedPass], chips: dict[str, Chip]) -> Found:
    """Return published ratios of M rows with their predictions, and summaries by kind of row.

    rows: source, kind, chip, what, m, base, published, predicted, error, fitted, verdict. errors: of rows that were
        not fitted. passes: published times of whole passes, see `passes`.
    """
    fitted, tested = split(predict(rows, chips))
    kinds = ("all", *sorted({p.row.kind for p in tested}))
    return {
        "rows": [_row(p, True) for p in fitted] + [_row(p, False) for p in tested],
        "errors": {kind: _errors([p for p in tested if kind in ("all", p.row.kind)]) for kind in kinds},
        "passes": passes(rows, chips),
    }


def _row(p: Prediction, fitted: bool) -> dict[str, Any]:
    row = {name: getattr(p.row, name) for name in ("source", "kind", "chip", "what", "m", "base")}
    return {
        **row,
        **{"published": p.row.ratio, "predicted": p.ratio, "error": p.error},
        **{"fitted": fitted, "verdict": "fitted" if fitted else p.verdict},
    }


def _errors(tested: Sequence[Prediction]) -> dict[str, float]:
    return dict(zip(("median", "greatest", "within", "rows"), errors(tested), strict=True))


def passes(rows: Iterable[PublishedPass], chips: dict[str, Chip]) -> list[dict[str, Any]]:
    """Return published seconds of stock MLX's whole passes with predictions for their own bytes and launches.

    Those of passes_published.csv are not fitted; of verify_published.csv the times of M <= 2 are (`fitted`).
    """
    timed = [row for row in rows if row.base_ms and row.what in MODELS]
    found = {(row.source, row.chip, row.what, 4, row.base, row.base_ms, row.mlx, True) for row in timed}
    found |= {(r.source, r.chip, r.what, 4, r.m, r.base_ms * r.ratio, r.mlx, r.m <= 2) for r in timed if r.base_ms}
    lines = [(*(line[name] for name in ("source", "chip", "model")), *_numbers(line)) for line in read_passes()]
    return [_pass(*line, chips=chips) for line in sorted([*found, *lines])]


def _numbers(line: dict[str, str]) -> tuple[int, int, float, float, bool]:
    return int(line["bits"]), int(line["m"]), float(line["ms"]), PassShape.mlx, False


def _pass(
    source: str, chip: str, model: str, bits: int, m: int, ms: float, mlx: float, fitted: bool, chips: dict[str, Chip]
) -> dict[str, Any]:
    costs = of_model(MODELS[model].with_fields(bits=bits), PassShape(m, context=CONTEXT, mlx=mlx), chips[chip])
    counted = {"bytes": float(costs.count @ costs.nbytes), "launches": float(costs.launches)}
    times = {"published": ms / 1e3, "predicted": seconds(costs, chips[chip])}
    of = {"source": source, "chip": chip, "model": model, "bits": bits, "m": m, "fitted": fitted}
    return {**of, **counted, "independent": float(costs.independent), **times}


def attention(chips: dict[str, Chip]) -> list[dict[str, Any]]:
    """Return predicted and published GB/s of the cache in stock MLX's attention; neither fitted nor a test."""
    found = []
    for source, chip, (heads, kv, width), context, m, published in ATTENTION:
        costs = of_op(AttentionOp(heads, kv, width), PassShape(m, context=context), chips[chip])
        predicted = float(costs.nbytes.sum()) / seconds(costs, chips[chip]) / 1e9
        shape = f"{heads}/{kv}, {width}"
        made = {"source": source, "chip": chip, "shape": shape, "context": context, "m": m}
        found.append(made | {"published": published, "predicted": predicted, "error": predicted / published - 1})
    return found
