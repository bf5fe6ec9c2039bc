"""Decide which kernels are on: as asked, or those that a trial finds right and faster than MLX on this machine."""

import itertools
import os
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..machine.errors import with_type
from .ab_test import FAILS, KernelTrial, check, time_pair
from .verdict_file import MLX_VERSION, Found, Key, RememberedVerdicts

LANES = ("off", "exact", "fast")
VARIABLE = "MLX_MTP_KERNELS"
MARGIN = 1.02  # of 80 trials of a thing with itself, on a busy CPU, 77 stayed below
BUDGET = 10.0  # seconds that a load may spend on trials; the next load tries the rest
ASKED = "asked for"


@dataclass(frozen=True)
class KernelVerdict:
    """Whether a kernel is on.

    right: seen to be. ratio: stock MLX's time over the kernel's, None if not timed. reason: why it is as it is.
    """

    on: bool
    right: bool
    ratio: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        timed = "" if self.ratio is None else f", {self.ratio:.2f}x"
        if self.on:
            return f"on{timed or f' ({self.reason})'}"
        return f"off: {self.reason}{timed}"


def requested(kernels: str | None) -> str | None:
    """Read the lane asked for by the argument, else by MLX_MTP_KERNELS where that is not empty; None: by trial.

    Raises ValueError for anything but "off", "exact" and "fast".
    """
    value, origin = (os.environ.get(VARIABLE) or None, VARIABLE) if kernels is None else (kernels, "kernels")
    if value is None or value in LANES:
        return value
    raise ValueError(f"{origin}={value}: allowed are {', '.join(LANES)}")


def decide(
    trials: Iterable[KernelTrial],
    *,
    lane: str | None,
    timer: Callable[[KernelTrial], float] = time_pair,
    remembered: RememberedVerdicts | None = None,
    budget: float = BUDGET,
) -> dict[Key, KernelVerdict]:
    """Give a verdict on each (op, shape, rows).

    lane: None switches on what is right and faster by MARGIN, as is remembered, or tried within `budget` seconds;
        "exact" and "fast" all that is right, without timing; "off" nothing.
    A kernel that is wrong is never on, and a warning says so.
    """
    trials = list(trials)
    assert lane in (None, *LANES), lane
    assert len({trial.key for trial in trials}) == len(trials), "two trials of one op, shape and number of rows"
    if lane == "off":
        return {trial.key: _off(ASKED) for trial in trials}
    if lane is None:
        return _by_trial(trials, timer, remembered, budget)
    wrong = {trial.key: check(trial) for trial in trials}
    _warn_of_wrong(wrong)
    return {key: _off(reason) if reason else KernelVerdict(True, True, reason=ASKED) for key, reason in wrong.items()}


def _by_trial(
    trials: list[KernelTrial],
    timer: Callable[[KernelTrial], float],
    remembered: RememberedVerdicts | None,
    budget: float,
) -> dict[Key, KernelVerdict]:
    """Judge by what is remembered, else by a trial while the budget of seconds lasts; remember what is found."""
    known = remembered.recall() if remembered else {}
    found: dict[Key, Found] = {}
    verdicts: dict[Key, KernelVerdict] = {}
    end = time.perf_counter() + budget
    for trial in trials:
        key = trial.key
        if key in known:
            verdicts[key] = _judged(known[key])
        elif time.perf_counter() >= end:
            verdicts[key] = _off(f"not tried, the {budget:g} s for trials were over")
        else:
            wrong = check(trial)
            try:
                found[key] = Found(wrong, None if wrong else float(timer(trial)))
                verdicts[key] = _judged(found[key])
            except Exception as e:
                verdicts[key] = KernelVerdict(False, True, reason=f"timing it fails with {with_type(e)}")
    _warn_of_wrong({key: finding.wrong for key, finding in found.items()})
    # What failed is tried again by the next load: memory may have been short.
    found = {key: finding for key, finding in found.items() if not (finding.wrong or "").startswith(FAILS)}
    if remembered and found:
        remembered.keep({**known, **found})
    return verdicts


def _judged(found: Found) -> KernelVerdict:
    if found.ratio is None:
        return _off(found.wrong or "")
    on = found.ratio > MARGIN
    return KernelVerdict(on, True, found.ratio, "" if on else "slower" if found.ratio < 1 else "no faster")


def _off(reason: str) -> KernelVerdict:
    return KernelVerdict(False, False, reason=reason)


def _warn_of_wrong(reasons: Mapping[Key, str | None]) -> None:
    """Warn, in a line per op: MLX may have changed what the kernel has to equal."""
    wrong = [(key, reason) for key, reason in reasons.items() if reason]
    for op, group in itertools.groupby(sorted(wrong), key=lambda item: item[0][0]):
        ((_, shape, rows), reason), *more = group
        others = f" (and {len(more)} more)" if more else ""
        text = f"kernel {op} is wrong with mlx {MLX_VERSION} and stays off: {shape}, M={rows}: {reason}{others}"
        warnings.warn(text, stacklevel=4)


def in_words(verdicts: Mapping[Key, KernelVerdict]) -> tuple[str, ...]:
    """Say verdicts, a line per op and shape: "verify_qmm 8x16 4-bit: M=2-5 on (1.31-1.80x), M=6-8 off (slower)"."""
    shapes: dict[tuple[str, str], list[tuple[int, KernelVerdict]]] = {}
    for (op, shape, rows), verdict in verdicts.items():
        shapes.setdefault((op, shape), []).append((rows, verdict))
    return tuple(f"{op} {shape}: {_ranges(sorted(found))}" for (op, shape), found in shapes.items())


def _ranges(found: list[tuple[int, KernelVerdict]]) -> str:
    """Say the verdicts of one shape, neighbouring row counts together where they differ in numbers only."""
    texts = []
    for _, group in itertools.groupby(enumerate(found), key=_kind):
        rows, verdicts = zip(*(item for _, item in group), strict=True)
        span = f"M={rows[0]}" if len(rows) == 1 else f"M={rows[0]}-{rows[-1]}"
        ratios = sorted(verdict.ratio for verdict in verdicts if verdict.on and verdict.ratio is not None)
        why = verdicts[0].reason
        if ratios:
            why = "-".join(dict.fromkeys(f"{ratio:.2f}" for ratio in (ratios[0], ratios[-1]))) + "x"
        texts.append(f"{span} {'on' if verdicts[0].on else 'off'} ({why})")
    return ", ".join(texts)


def _kind(item: tuple[int, tuple[int, KernelVerdict]]) -> tuple[bool, str, int]:
    """Give what neighbours have in common; the last number is that of a run of row counts without a gap."""
    place, (rows, verdict) = item
    return verdict.on, re.sub(r"\d+", "#", verdict.reason), rows - place
