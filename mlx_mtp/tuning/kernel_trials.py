"""Decide which kernels are on: as the user requests, or by trials of their bits and speed on this machine."""

import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from ..kernels import out_of_memory
from ..kernels.contraction import is_taken, others, spelled, spelling, take
from ..machine.progress import report_progress
from .ab_test import DIFFERS, FAILS, KernelTrial, check, compile_kernel, failing, time_pair
from .kernel_verdict import AS_ROWS, MARGIN, KernelVerdict, judged, off
from .verdict_file import MLX_VERSION, RememberedVerdicts, TrialFinding, VerdictKey

LANES = ("off", "exact", "matrix")
VARIABLE = "MLX_MTP_KERNELS"
BUDGET = 10.0  # seconds of trials per load, without compilation
FIRST = {2: 0, 4: 1, 1: 2}  # order of trials by rows: cycles with one draft, with three, plain steps
DRAWS_OF_FOLLOWING = 2  # draws of a short check: one with NaN, one with infinity
ASKED, OF_LANE, NOT_TRIED, TRYING = "asked for", "of the lane", "not tried", "Trying kernels"
RIGHT = TrialFinding("", None)


def requested(kernels: str | None) -> str | None:
    """Return the lane that `kernels`, or for None a non-empty MLX_MTP_KERNELS, requests; None to decide by trial.

    Raises ValueError for anything but "off", "exact" and "matrix".
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
) -> dict[VerdictKey, KernelVerdict]:
    """Return a verdict for each (op, shape, rows); a wrong kernel is off, with a warning if a new trial finds it.

    lane: None switches on kernels that are right and faster by MARGIN; "exact" and "matrix" all that are right,
        without timing; "off" none.
    budget: seconds for new trials, in which compilation does not count; trials also end once `stop` returns True.
        Kernels that are not tried are off. timer, budget and stop are ignored unless lane is None.
    remembered: stored findings, which are used and added to; in "exact" and "matrix" only those of kernels that do
        not compile or run.
    By trial, of the trials that share a compiled kernel only the one with the maximum row count, then weights, is
    timed.
    """
    trials = list(trials)
    assert lane in (None, *LANES), lane
    assert len({trial.key for trial in trials}) == len(trials), "two trials of one op, shape and number of rows"
    if lane == "off":
        return {trial.key: off(ASKED) for trial in trials}
    if lane is None:
        return _by_trial(trials, Decisions(timer, budget, stop), remembered)
    known = {key: found for key, found in remembered.recall().items() if refused(found)} if remembered else {}
    found: dict[VerdictKey, TrialFinding] = {}
    while left := [trial for trial in trials if is_stale(trial.key, found.get(trial.key))]:
        for done, trial in enumerate(left):
            report_progress(TRYING, done, len(left))
            last = found.get(trial.base) if trial.base else known.get(trial.key)
            wrong, split = (last.wrong, last.split) if last else check_split(trial)
            found[trial.key] = TrialFinding(wrong or "", None, spelling(trial.op), split)
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
    """Check a kernel, if necessary with other spellings of its multiply-adds; return why it is wrong, or None.

    Other spellings are tried only if nothing but its bits differs from MLX. The first one with MLX's bits is then
    used for all kernels of the trial's op, and the result is None.
    """
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
    """Return (why a kernel is wrong, or None; whether its rows must be split).

    They must be split if the kernel does not run otherwise; the reason is then that of the kernel with split rows.
    """
    wrong = check_spellings(trial)
    if wrong and wrong.startswith(FAILS) and trial.split:
        return check_spellings(trial.of_split()), True
    return wrong, False


def faster(trial: KernelTrial, split: bool, timer: Callable[[KernelTrial], float]) -> tuple[float, bool]:
    """Return the time of MLX's operations over a kernel's, and whether its rows are split.

    split: only the kernel with split rows runs. Otherwise splitting, if it is possible and right, must be faster by
    MARGIN.
    """
    other = trial.of_split()
    ratio = float(timer(other if split else trial))
    if trial.split and not split and check(replace(other, draws=DRAWS_OF_FOLLOWING)) is None:
        of_split = float(timer(other))
        return (of_split, True) if of_split > ratio * MARGIN else (ratio, False)
    return ratio, split


def is_stale(key: VerdictKey, found: TrialFinding | KernelVerdict | None) -> bool:
    """Return whether a finding is missing, or was made with another spelling of multiply-adds than its op has now."""
    return found is None or found.spelling != spelling(key[0])


def refused(found: TrialFinding) -> bool:
    """Return whether a kernel does not compile or run, for a reason other than a lack of memory."""
    wrong = found.wrong or ""
    return wrong.startswith(FAILS) and not out_of_memory(wrong)


def sharing(trials: Iterable[KernelTrial]) -> list[list[KernelTrial]]:
    """Group trials by the compiled kernel that they share, in the order of FIRST; large trials first in a group."""
    groups: dict[tuple[str, str, int], list[KernelTrial]] = {}
    for trial in trials:
        groups.setdefault((trial.op, trial.kind or trial.shape, trial.compiled_rows), []).append(trial)
    for group in groups.values():
        group.sort(key=lambda trial: (-trial.rows, -trial.weights))
    return sorted(groups.values(), key=lambda group: FIRST.get(rows := group[0].compiled_rows, rows))


class Decisions:
    """The verdicts of one call of `decide` by trial.

    timer, budget, stop: as in `decide`. known: stored findings. found: new ones.
    """

    def __init__(self, timer: Callable[[KernelTrial], float], budget: float, stop: Callable[[], bool]):
        self.timer, self.budget, self.stop, self.end = timer, budget, stop, time.perf_counter() + budget
        self.known: dict[VerdictKey, TrialFinding] = {}
        self.found: dict[VerdictKey, TrialFinding] = {}
        self.verdicts: dict[VerdictKey, KernelVerdict] = {}

    def judge(self, group: Sequence[KernelTrial]) -> None:
        """Add the verdicts of trials that share a kernel: the first right one is timed, the others follow it.

        See `_following`; trials before the timed one are off. Those that are `untimed` are on if they are right.
        """
        if group[0].untimed:
            return self._checked(group)
        timed: KernelTrial | None = None
        for trial in group:
            verdict = self._timed(trial) if timed is None else self._following(trial, timed)
            self.verdicts[trial.key] = replace(verdict, spelling=spelling(trial.op))
            timed = trial if timed is None and verdict.ratio is not None else timed

    def _checked(self, group: Sequence[KernelTrial]) -> None:
        """Add the verdicts of trials that share a kernel: the largest of each shape is checked, the others follow."""
        shapes: dict[str, KernelVerdict] = {}
        for trial in group:
            if trial.shape not in shapes:
                known = self._known(trial, None)
                if known is None and (why := self._no_time(trial)):
                    shapes[trial.shape] = off(why)
                else:
                    if known is None:
                        known = self.found[trial.key] = TrialFinding(check(trial) or "", None, spelling(trial.op))
                    right = KernelVerdict(True, True, reason=OF_LANE)
                    shapes[trial.shape] = off(known.wrong) if known.wrong else right
            self.verdicts[trial.key] = replace(shapes[trial.shape], spelling=spelling(trial.op))

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
        self.found[trial.key] = TrialFinding(wrong, ratio, spelling(trial.op), base.split if base else split)
        return judged(self.found[trial.key])

    def _following(self, trial: KernelTrial, timed: KernelTrial) -> KernelVerdict:
        """Return a verdict without timing: on if the timed trial is on and this one is right, checked or stored.

        With fewer rows than the timed trial, it is off if the verdict on one row less is off. It is also off if there
        is no time to check it.
        """
        verdict = self.verdicts[timed.key]
        trial, known = trial.chosen(verdict.split), self._known(trial, verdict)
        below = self.verdicts.get((trial.op, trial.shape, trial.rows - 1), verdict)
        if not verdict.on or (trial.rows < timed.rows and not below.on):
            return off((verdict if not verdict.on else below).reason)
        if known is None:
            if why := self._no_time(trial):
                return off(why)
            wrong = check_spellings(replace(trial, draws=DRAWS_OF_FOLLOWING)) or ""
            known = self.found[trial.key] = TrialFinding(wrong, None, spelling(trial.op), verdict.split)
        if known.wrong != RIGHT.wrong:
            return judged(known)
        as_timed = f"{AS_ROWS}{timed.rows}" if trial.shape == timed.shape else f"as {timed.shape.split()[0]}"
        return KernelVerdict(True, True, reason=as_timed, split=verdict.split)

    def _known(self, trial: KernelTrial, like: KernelVerdict | None) -> TrialFinding | None:
        """Return the stored finding of a trial; None if there is none, or if it does not apply.

        The finding applies if it was made with the spelling of multiply-adds that the op has now and, with `like`,
        for a kernel that splits rows as `like` does.
        """
        known = self.known.get(trial.key)
        return None if is_stale(trial.key, known) or (like and known and known.split != like.split) else known

    def _no_time(self, trial: KernelTrial) -> str:
        """Return why a kernel cannot be tried now, "" if it can.

        Unless the time is used up or `stop` returns True, the kernel is compiled here; that is not trial time.
        """
        if (tic := time.perf_counter()) >= self.end:
            return f"{NOT_TRIED}, the {self.budget:g} s for trials were used up"
        if not self.stop():
            compile_kernel(trial)
            if trial.split:
                compile_kernel(trial.of_split())
            self.end += time.perf_counter() - tic
        return f"{NOT_TRIED} yet" if self.stop() else ""


def _by_trial(
    trials: list[KernelTrial], decisions: Decisions, remembered: RememberedVerdicts | None
) -> dict[VerdictKey, KernelVerdict]:
    """Return verdicts from stored findings, else by trials; new findings are stored even after an interruption.

    Failures for lack of memory are not stored.
    """
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
        # A kernel that failed for lack of memory is tried again by the next load.
        kept = {key: f for key, f in found.items() if refused(f) or not (f.wrong or "").startswith(FAILS)}
        if remembered:
            remembered.add(kept)
    warn_of_wrong({key: finding.wrong for key, finding in found.items()})
    return {trial.key: decisions.verdicts[trial.key] for trial in trials}


def warn_of_wrong(reasons: Mapping[VerdictKey, str | None]) -> None:
    """Warn of wrong kernels, one warning per op, as after a change of MLX's own kernels.

    reasons: by (op, shape, rows); None or "" for a kernel that is right.
    """
    wrong = [(key, reason) for key, reason in reasons.items() if reason]
    for op, group in itertools.groupby(sorted(wrong), key=lambda item: item[0][0]):
        ((_, shape, rows), reason), *more = group
        others = f" (and {len(more)} more)" if more else ""
        text = f"kernel {op} is wrong with mlx {MLX_VERSION} and stays off: {shape}, M={rows}: {reason}{others}"
        warnings.warn(text, stacklevel=4)
