"""Fit two constants of each chip to published times of one and two rows, and predict those of three to eight.

    python -m bench.cost_model.fit    (at the checkout's root)

writes the file that `mlx-mtp bench model` reads: the constants and the validation.

For each chip the shares of bandwidth and of issue rate are the most likely ones, given its rows of M <= 2 (assumed
right within 10%) and a prior: for the bandwidth the published share, else 85%, within 10%; for the issue rate, within
30%, the fit to all rows of M <= 2 of its family (M1 and M2; M3 and later). A chip without rows keeps the prior.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mlx_mtp.bench.roofline.chips import CHIPS, FILE, Chip
from mlx_mtp.bench.roofline.cost import FORM, FORMS, PassCosts

from .published import PublishedPass, read_rows
from .tables import summary
from .validation import errors, fitted_to, predict, split, validation

ERROR, BANDWIDTH_PRIOR, ISSUE_PRIOR = 0.10, 0.10, 0.30
BANDWIDTHS = np.linspace(0.6, 1.0, 41)
ISSUES = np.geomspace(0.2, 3.0, 136)  # 2% apart


def on_grid(costs: PassCosts, chip: Chip, form: str) -> np.ndarray:
    """Return predicted seconds for every pair of shares [bandwidths, issues]."""
    memory = costs.nbytes / (chip.gbps * 1e9) / BANDWIDTHS[:, None, None]
    issue = costs.instructions / (chip.tflops * 1e12 / 2) / ISSUES[:, None]
    return FORMS[form](memory, issue) @ costs.count + costs.launch_seconds(chip)


def misfit(rows: Iterable[PublishedPass], chip: Chip, form: str, caches: bool) -> np.ndarray:
    """Return the sum of squares of (error / its expected size) for every pair of shares, using only M <= 2."""
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


def family(chip: Chip) -> str:
    """Return the family of a chip: from M3 on integer and float instructions issue at the same time."""
    return "M3 and later" if chip.generation >= 15 else "M1 and M2"


def fit(rows: Sequence[PublishedPass], form: str = FORM, caches: bool = True) -> dict[str, Chip]:
    """Return all chips with their two fitted shares."""
    by_chip = defaultdict(list)
    for row in rows:
        by_chip[row.chip].append(row)
    misfits = {name: misfit(of_chip, CHIPS[name], form, caches) for name, of_chip in by_chip.items()}
    fitted = {}
    for name, chip in CHIPS.items():
        alike = [found for other, found in misfits.items() if family(CHIPS[other]) == family(chip)]
        pooled = ISSUES[np.argmin(sum(found.min(axis=0) for found in alike))]
        penalty = (np.log(ISSUES / pooled) / ISSUE_PRIOR) ** 2
        found = misfits[name] if name in misfits else misfit([], chip, form, caches)
        best = np.unravel_index(np.argmin(found + penalty), found.shape)
        fitted[name] = replace(chip, usable=float(BANDWIDTHS[best[0]]), issue=float(ISSUES[best[1]]))
    return fitted


def forms(rows: Sequence[PublishedPass]) -> list[dict[str, Any]]:
    """Fit other forms of t(a, b) to M <= 2: return form, caches, used, and errors of both kinds of rows."""
    found = []
    for caches in (True, False):
        for form in FORMS:
            near, far = (errors(made) for made in split(predict(rows, fit(rows, form, caches), form, caches)))
            used = form == FORM and caches
            found.append({"form": form, "caches": caches, "used": used, "fitted": near, "tested": far})
    return found


def stored(rows: Sequence[PublishedPass]) -> dict[str, Any]:
    """Return the contents of the package's file: shares of each chip, the validation, and its summary."""
    chips = fit(rows)
    constants = {
        name: {"usable": chip.usable, "issue": chip.issue, "fitted_to": fitted_to(name, rows)}
        for name, chip in chips.items()
    }
    checked = validation(rows, chips)
    return {"chips": constants, "validation": checked, "summary": summary(checked)}


if __name__ == "__main__":
    FILE.write_text(json.dumps(stored(read_rows()), indent=1) + "\n")
