"""The two constants of each chip, fitted to published times of one and two rows; those of three to eight, predicted.

For each chip the shares of bandwidth and of issue rate are the most likely ones, given its rows of M <= 2 (taken to
be right within 10%) and a prior: of the bandwidth what is published, else 85%, within 10%; of the issue rate, within
30%, what all rows of M <= 2 of its family (M1 and M2; M3 and later) say. A chip without rows keeps the prior.
"""

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from .chips import CHIPS, Chip
from .cost import FORM, FORMS, LAUNCH, Costs, Pass, of_model, of_op, seconds
from .ops import Linear
from .released import MODELS, dense_70b

DATA = Path(__file__).parent
CONTEXT = 512  # of published whole passes, "short"
WITHIN = 0.25
ERROR, BANDWIDTH_PRIOR, ISSUE_PRIOR = 0.10, 0.10, 0.30
BANDWIDTHS = np.linspace(0.6, 1.0, 41)
ISSUES = np.geomspace(0.2, 3.0, 136)  # 2% apart

# Why a row may be off by more than 25%; one without a reason is then a FAIL.
REASONS = {
    "spread": "the chip's shapes span 1.73-3.03 at M=8: the model knows no shapes, no number is within 25% of both",
}


@dataclass(frozen=True)
class Row:
    """One published ratio T(m) / T(base); base_ms is T(base), if given.

    Warm: T(1) implies more than the chip's bandwidth, so the weights came from its cache and memory is left out.
    """

    source: str
    kind: str
    chip: str
    what: str
    linear: Linear | None
    mlx: float
    warm: bool
    base: int
    base_ms: float | None
    m: int
    ratio: float
    reason: str

    def costs(self, m: int, chip: Chip, caches: bool = True) -> Costs:
        at = Pass(m, context=CONTEXT, mlx=self.mlx, caches=caches)
        if self.linear:
            found = of_op(self.linear, at, chip)
            return found._replace(nbytes=0 * found.nbytes) if self.warm else found
        return of_model(MODELS.get(self.what) or dense_70b(), at, chip)


@dataclass(frozen=True)
class Prediction:
    row: Row
    ratio: float

    @property
    def error(self) -> float:
        return self.ratio / self.row.ratio - 1

    @property
    def verdict(self) -> str:
        if abs(self.error) <= WITHIN:
            return "ok"
        return "unexplained: " + REASONS[self.row.reason] if self.row.reason else "FAIL"


def read_rows(path: Path = DATA / "verify_published.csv") -> list[Row]:
    with path.open(newline="") as file:
        return [parse(line) for line in csv.DictReader(file)]


def parse(line: dict[str, str]) -> Row:
    sizes = [int(line[name]) for name in ("n", "k", "bits", "group")] if line["n"] else None
    return Row(
        source=line["source"],
        kind=line["kind"],
        chip=line["chip"],
        what=line["what"],
        linear=Linear(line["what"], *sizes) if sizes else None,
        mlx=float(line["mlx"]),
        warm=line["warm"] == "1",
        base=int(line["base"]),
        base_ms=float(line["base_ms"]) if line["base_ms"] else None,
        m=int(line["m"]),
        ratio=float(line["ratio"]),
        reason=line["reason"],
    )


def read_unused() -> list[dict[str, str]]:
    with (DATA / "verify_unused.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def on_grid(costs: Costs, chip: Chip, form: str) -> np.ndarray:
    """Seconds for every pair of shares [bandwidths, issues]."""
    memory = costs.nbytes / (chip.gbps * 1e9) / BANDWIDTHS[:, None, None]
    issue = costs.instructions / (chip.tflops * 1e12 / 2) / ISSUES[:, None]
    return FORMS[form](memory, issue) @ costs.count + costs.launches * LAUNCH


def misfit(rows: Iterable[Row], chip: Chip, form: str, caches: bool) -> np.ndarray:
    """Sum of squares of (error / its expected size) for every pair of shares; looks at M <= 2 only."""
    total = (np.log(BANDWIDTHS / chip.usable) / BANDWIDTH_PRIOR)[:, None] ** 2 + 0 * ISSUES
    timed = {(row.source, row.base): (row, row.base_ms) for row in rows if row.base <= 2 and row.base_ms}
    for row, ms in timed.values():
        total += (np.log(on_grid(row.costs(row.base, chip, caches), chip, form) * 1e3 / ms) / ERROR) ** 2
    for row in rows:
        if row.m <= 2:
            times = [on_grid(row.costs(m, chip, caches), chip, form) for m in (row.m, row.base)]
            ratio = times[0] / times[1]
            total += (np.log(ratio / row.ratio) / ERROR) ** 2
    return total


def fit(rows: Sequence[Row], form: str = FORM, caches: bool = True) -> dict[str, Chip]:
    """All chips with their two shares."""
    by_chip = defaultdict(list)
    for row in rows:
        by_chip[row.chip].append(row)
    misfits = {name: misfit(of_chip, CHIPS[name], form, caches) for name, of_chip in by_chip.items()}
    fitted = {}
    for name, chip in CHIPS.items():
        alike = [found for other, found in misfits.items() if CHIPS[other].family == chip.family]
        pooled = ISSUES[np.argmin(sum(found.min(axis=0) for found in alike))]
        penalty = (np.log(ISSUES / pooled) / ISSUE_PRIOR) ** 2
        found = misfits[name] if name in misfits else misfit([], chip, form, caches)
        best = np.unravel_index(np.argmin(found + penalty), found.shape)
        fitted[name] = replace(chip, usable=float(BANDWIDTHS[best[0]]), issue=float(ISSUES[best[1]]))
    return fitted


def predict(rows: Iterable[Row], chips: dict[str, Chip], form: str = FORM, caches: bool = True) -> list[Prediction]:
    made = []
    for row in rows:
        chip = chips[row.chip]
        times = [seconds(row.costs(m, chip, caches), chip, form) for m in (row.m, row.base)]
        made.append(Prediction(row, times[0] / times[1]))
    return made


def split(made: Iterable[Prediction]) -> tuple[list[Prediction], list[Prediction]]:
    """Those that were fitted (M <= 2), and those that were not."""
    made = list(made)
    return [p for p in made if p.row.m <= 2], [p for p in made if p.row.m > 2]


def errors(predictions: Iterable[Prediction]) -> tuple[float, float, int, int]:
    """Median and greatest error, how many rows are within 25%, of how many."""
    found = [abs(p.error) for p in predictions]
    return median(found), max(found), sum(e <= WITHIN for e in found), len(found)
