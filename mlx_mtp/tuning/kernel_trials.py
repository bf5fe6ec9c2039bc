"""Decide which kernels are on: as asked, or those that a trial finds right and faster than MLX on this machine."""

import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ..kernels import out_of_memory, padded
from ..kernels.contraction import is_taken, others, spelled, spelling, take
from ..machine.progress import report_progress
from .ab_test import DIFFERS, FAILS, KernelTrial, check, compile_kernel, failing, time_pair
from .kernel_verdict import AS_ROWS, MARGIN, KernelVerdict, judged, off
from .verdict_file import MLX_VERSION, Found, Key, RememberedVerdicts

LANES = ("off", "exact", "fast")
VARIABLE = "MLX_MTP_KERNELS"
BUDGET = 10.0  # seconds that a load may spend on trials, compilation not counted
FIRST = {2: 0, 4: 1, 1: 2}  # by the rows of a cycle with one draft, with three, and of a plain step
DRAWS_OF_FOLLOWING = 2  # of a check: with NaN and with infinity
ASKED, NOT_TRIED, TRYING = "asked for", "not tried", "Trying kernels"
RIGHT = Found("", None)


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
    stop: Callable[[], bool] = lambda: False,
) -> dict[Key, KernelVerdict]:
    """Give a verdict on each (op, shape, rows).

    lane: None switches on what is right and faster by MARGIN, as is remembered, or tried within `budget` seconds,
        compilation not counted, before `stop` says that somebody waits; "exact" and "fast" all that is right, without
        timing; "off" nothing.
    By trial, what shares a compiled kernel is timed once, where it reads the most weights, for most of its rows.
    A kernel that is wrong is never on, and a warning says so.
    """
    trials = list(trials)
    assert lane in (None, *LANES), lane
    assert len({trial.key for trial in trials}) == len(trials), "two trials of one op, shape and number of rows"
    if lane == "off":
        return {trial.key: off(ASKED) for trial in trials}
    if lane is None:
        return _by_trial(trials, Decisions(timer, budget, stop), remembered)
    known = {key: found for key, found in remembered.recall().items() if refused(found)} if remembered else {}
    found: dict[Key, Found] = {}
    while left := [trial for trial in trials if is_stale(trial.key, found.get(trial.key))]:
        for done, trial in enumerate(left):
            report_progress(TRYING, done, len(left))
            last = found.get(trial.base) if trial.base else known.get(trial.key)
            wrong, split = (last.wrong, last.split) if last else check_split(trial)
            found[trial.key] = Found(wrong or "", None, spelling(trial.op), split)
    new = {key: finding for key, finding in found.items() if key not in known}
    if remembered:
        remembered.add({key: finding for key, finding in new.items() if refused(finding)})
    warn_of_wrong({key: finding.wrong for key, finding in new.items()})
    asked = KernelVerdict(True, True, reason=ASKED)
    return {
        key: replace(off(f.wrong) if f.wrong else asked, spelling=f.spelling, split=f.split)
        for key, f in found.items()
    }


def check_spellings(trial: KernelTrial) -> str | None:
    """Say why the kernel is wrong, or None; where only its bits are, its op takes another spelling that has MLX's."""
    wrong = check(trial)
    if wrong is None:
        take(trial.op, spelling(trial.op))
    for other in others(trial.op) if wrong and DIFFERS in wrong else ():
        with spelled(trial.op, other):
            right = check(trial) is None
        if right:
            take(trial.op, other)
            return None
    return wrong


def check_split(trial: KernelTrial) -> tuple[str | None, bool]:
    """Say why the kernel is wrong, or None, and whether that is of split rows: where it cannot run without."""
    wrong = check_spellings(trial)
    if wrong and wrong.startswith(FAILS) and trial.split:
        return check_spellings(trial.of_split()), True
    return wrong, False


def faster(trial: KernelTrial, split: bool, timer: Callable[[KernelTrial], float]) -> tuple[float, bool]:
    """Time a kernel; return stock MLX's time over its own, and whether its rows are split.

    split: only the kernel that splits them runs. Else both are timed where both are right, and it has to be the
    faster one by MARGIN.
    """
    other = trial.of_split()
    ratio = float(timer(other if split else trial))
    if trial.split and not split and check(replace(other, draws=DRAWS_OF_FOLLOWING)) is None:
        of_split = float(timer(other))
        return (of_split, True) if of_split > ratio * MARGIN else (ratio, False)
    return ratio, split


def is_stale(key: Key, found: Found | KernelVerdict | None) -> bool:
    """Return whether a finding is missing, or of another spelling than its op has by now."""
    return found is None or found.spelling != spelling(key[0])


def refused(found: Found) -> bool:
    """Tell whether a kernel was found not to compile or run, which it will not the next time either."""
    wrong = found.wrong or ""
    return wrong.startswith(FAILS) and not out_of_memory(wrong)


def sharing(trials: Iterable[KernelTrial]) -> list[list[KernelTrial]]:
    """Group trials by the compiled kernel that they share, first those of most cycles; in each the heaviest first."""
    groups: dict[tuple[str, str, int], list[KernelTrial]] = {}
    for trial in trials:
        groups.setdefault((trial.op, trial.kind or trial.shape, padded(trial.rows)), []).append(trial)
    for group in groups.values():
        group.sort(key=lambda trial: (-trial.rows, -trial.weights))
    return sorted(groups.values(), key=lambda group: FIRST.get(rows := padded(group[0].rows), rows))


class Decisions:
    """The verdicts of a load, or of a pause between two answers, as they are found.

    timer, budget, stop: as `decide` has them. known: what is remembered; found: what was not.
    """

    def __init__(self, timer: Callable[[KernelTrial], float], budget: float, stop: Callable[[], bool]):
        self.timer, self.budget, self.stop, self.end = timer, budget, stop, time.perf_counter() + budget
        self.known: dict[Key, Found] = {}
        self.found: dict[Key, Found] = {}
        self.verdicts: dict[Key, KernelVerdict] = {}

    def judge(self, group: Sequence[KernelTrial]) -> None:
        """Judge trials that share a kernel: one is timed, and the others follow it where they are right."""
        timed: KernelTrial | None = None
        for trial in group:
            verdict = self._timed(trial) if timed is None else self._following(trial, timed)
            self.verdicts[trial.key] = replace(verdict, spelling=spelling(trial.op))
            timed = trial if timed is None and verdict.ratio is not None else timed

    def _timed(self, trial: KernelTrial) -> KernelVerdict:
        base = self.verdicts[trial.base] if trial.base else None
        if base and not base.right:
            return off(base.reason)
        trial = trial.chosen(base.split) if base else trial
        known = self._known(trial, base)
        if known and known.wrong != RIGHT.wrong:
            return judged(known)
        if why := self._no_time(trial):
            return off(why)
        wrong, split = check_split(trial)
        ratio = None
        try:
            if not wrong:
                ratio, split = faster(trial, split, self.timer)
        except Exception as e:
            return KernelVerdict(False, True, reason=f"timing it {failing(e)}")
        self.found[trial.key] = Found(wrong, ratio, spelling(trial.op), base.split if base else split)
        return judged(self.found[trial.key])

    def _following(self, trial: KernelTrial, timed: KernelTrial) -> KernelVerdict:
        """Judge as the timed one where this one is right; a number of rows less, only if the one below is on, too."""
        verdict = self.verdicts[timed.key]
        trial, known = trial.chosen(verdict.split), self._known(trial, verdict)
        below = self.verdicts.get((trial.op, trial.shape, trial.rows - 1), verdict)
        if not verdict.on or (trial.rows < timed.rows and not below.on):
            return off((verdict if not verdict.on else below).reason)
        if known is None:
            if why := self._no_time(trial):
                return off(why)
            wrong = check_spellings(replace(trial, draws=DRAWS_OF_FOLLOWING)) or ""
            known = self.found[trial.key] = Found(wrong, None, spelling(trial.op), verdict.split)
        if known.wrong != RIGHT.wrong:
            return judged(known)
        as_timed = f"{AS_ROWS}{timed.rows}" if trial.shape == timed.shape else f"as {timed.shape.split()[0]}"
        return KernelVerdict(True, True, reason=as_timed, split=verdict.split)

    def _known(self, trial: KernelTrial, like: KernelVerdict | None) -> Found | None:
        """Return what is remembered, unless it is of another spelling than the op's, or alternative than `like`'s."""
        known = self.known.get(trial.key)
        return None if is_stale(trial.key, known) or (like and known and known.split != like.split) else known

    def _no_time(self, trial: KernelTrial) -> str:
        """Compile the kernel and say "", or why it cannot be tried now."""
        if (tic := time.perf_counter()) >= self.end:
            return f"{NOT_TRIED}, the {self.budget:g} s for trials were over"
        if not self.stop():
            compile_kernel(trial)
            if trial.split:
                compile_kernel(trial.of_split())
            self.end += time.perf_counter() - tic
        return f"{NOT_TRIED} yet" if self.stop() else ""


def _by_trial(
    trials: list[KernelTrial], decisions: Decisions, remembered: RememberedVerdicts | None
) -> dict[Key, KernelVerdict]:
    """Judge by what is remembered, else by trials; remember what is found, also if interrupted."""
    decisions.known = remembered.recall() if remembered else {}
    for (op, *_), known in decisions.known.items():
        if not is_taken(op):
            take(op, known.spelling)
    found, verdicts = decisions.found, decisions.verdicts
    try:
        while left := [g for g in sharing(trials) if any(is_stale(t.key, verdicts.get(t.key)) for t in g)]:
            for done, group in enumerate(left):
                report_progress(TRYING, done, len(left))
                decisions.judge(group)
    finally:
        # What failed for want of memory is tried again by the next load.
        kept = {key: f for key, f in found.items() if refused(f) or not (f.wrong or "").startswith(FAILS)}
        if remembered:
            remembered.add(kept)
    warn_of_wrong({key: finding.wrong for key, finding in found.items()})
    return {trial.key: decisions.verdicts[trial.key] for trial in trials}


def warn_of_wrong(reasons: Mapping[Key, str | None]) -> None:
    """Warn, in a line per op: MLX may have changed what the kernel has to equal."""
    wrong = [(key, reason) for key, reason in reasons.items() if reason]
    for op, group in itertools.groupby(sorted(wrong), key=lambda item: item[0][0]):
        ((_, shape, rows), reason), *more = group
        others = f" (and {len(more)} more)" if more else ""
        text = f"kernel {op} is wrong with mlx {MLX_VERSION} and stays off: {shape}, M={rows}: {reason}{others}"
        warnings.warn(text, stacklevel=4)
