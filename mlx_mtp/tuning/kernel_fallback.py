"""Switch off the kernels that Metal refuses, so that MLX's own operations take their place from the next graph on."""

import warnings
from contextlib import suppress
from typing import Any, NamedTuple

from ..kernels import KernelRefused, Refusal, launched, out_of_memory, run_again, run_new
from ..machine.errors import refusal
from .ab_test import FAILS, KernelTrial, failing
from .kernel_sites import placed
from .kernel_switch import ModelTrials, put_on
from .kernel_trials import warn_of_wrong
from .verdict_file import Key

# Kernels that no trial launches: they draw from what the kernel of a trial has found.
WITHOUT_TRIAL = {"draw_top": "verify_head"}


class Failed(NamedTuple):
    """A kernel that is off because it does not compile or run. kernel: op and shape. rows: the row counts."""

    kernel: str
    rows: tuple[int, ...]
    reason: str


class GraphFailed(RuntimeError):
    """MLX raised `error` while it evaluated a graph: what the graph was to write in place may be lost."""

    def __init__(self, error: Exception):
        super().__init__(refusal(error))
        self.error = error


TROUBLE = (KernelRefused, GraphFailed)
Trouble = KernelRefused | GraphFailed


def run_first(model: Any, refused: KernelRefused | None = None) -> None:
    """Run what a graph of `model`, about to be evaluated, launches for the first time.

    Raises KernelRefused where Metal refuses something, or has refused it when the graph was built; on every rank, if
    the model is split over several.
    """
    refused = refused or newly_refused()
    if ranks := model.ranks:
        if any(number for (number,) in ranks.gather([refused is not None])):
            raise KernelRefused(refused.refusals if refused else [], voted=True)
    elif refused:
        raise refused


def vote(model: Any, error: Trouble) -> None:
    """Tell the other ranks, which are in `run_first`, of an error that they do not have."""
    if model.ranks and isinstance(error, KernelRefused) and not error.voted:
        with suppress(KernelRefused):
            run_first(model, error)


def newly_refused() -> KernelRefused | None:
    """Run what this thread has launched for the first time; return what is refused."""
    try:
        run_new()
    except KernelRefused as e:
        return e
    return None


class Fallback:
    """The fallback of one generation, whose model is `model`. after: tokens that there were at the last failure."""

    def __init__(self, model: Any):
        self.model, self.after = model, -1

    def take(self, error: Trouble, tokens: int) -> None:
        """Switch off the kernels to blame for an error that came after so many tokens.

        A graph may fail though each of its kernels runs alone: it is then built once more with the same kernels, and
        without any where it fails again. Raises MLX's error where no kernel can be to blame.
        """
        if isinstance(error, KernelRefused):
            return fall_back(self.model, error)
        waited_for = self.model.ranks  # by others, within the graph
        if waited_for or not any_on(self.model) or out_of_memory(str(error.error)):
            raise error.error
        if refusals := run_again():
            return fall_back(self.model, KernelRefused(refusals))
        if self.after == tokens:
            return switch_all_off(self.model, failing(error.error))
        self.after = tokens
        drop_recordings(self.model)
        warnings.warn(f"a graph with kernels {failing(error.error)}; it is built again", stacklevel=2)


def any_on(model: Any) -> bool:
    """Tell whether a kernel of a model is on."""
    return any(site.rows for site in placed(model))


def trials_of(model: Any) -> ModelTrials:
    """Return the trials of a model's load, or what stands for them where sites were switched on without any."""
    found = model.runtime.trials
    return found or ModelTrials.of_sites(model, placed(model))


def fall_back(model: Any, error: KernelRefused) -> None:
    """Switch off what launches the refused kernels, on every rank if there are several; raise where nothing does."""
    blamed = blame(trials_of(model), error.refusals)
    if ranks := model.ranks:
        told = ranks.gather_values([[*key, reason] for key, reason in blamed.items()])
        blamed = {(op, shape, rows): reason for found in told for op, shape, rows, reason in found}
    if blamed:
        switch_off(model, blamed)
    elif any_on(model):
        switch_all_off(model, failing(error))
    else:
        raise error


def blame(found: ModelTrials, refusals: list[Refusal]) -> dict[Key, str]:
    """Find the kernels that are on and launch what was refused, by op, shape and rows, each with the reason.

    A launch that no trial makes is blamed on all of its op, and an unknown one on all kernels.
    """
    live = [trial for trial in found.all_trials if found.all_verdicts[trial.key].on]
    launches = {trial.key: launches_of(trial.chosen(found.all_verdicts[trial.key].split)) for trial in live}
    blamed: dict[Key, str] = {}
    for refused in refusals:
        op = WITHOUT_TRIAL.get(refused.key[0], refused.key[0])
        exact = [key for key, keys in launches.items() if refused.key in keys]
        alike = [key for key, keys in launches.items() if op in (key[0], *(launch[0] for launch in keys))]
        blamed |= dict.fromkeys(exact or alike or launches, failing(refused.error))
    return blamed


def launches_of(trial: KernelTrial) -> set[tuple]:
    """Build a trial's graph; return what it launches, up to what is refused."""
    with launched() as keys:
        try:
            trial.pairs[0][0](trial.x(0))
        except KernelRefused as e:
            keys += [refused.key for refused in e.refusals]
        except (RuntimeError, ValueError):  # of memory, as it may be now; what comes behind is not known
            return set(keys)
    return set(keys)


def switch_off(model: Any, reasons: dict[Key, str], *, remembered: bool = True) -> None:
    """Switch kernels off, by op, shape and rows, for these reasons; warn, and let the report say so.

    remembered: later loads leave them off.
    """
    found = trials_of(model)
    for key, reason in reasons.items():
        found.reject(key, reason, remembered=remembered)
    model.runtime.failed |= reasons
    put_on(model, found)
    drop_recordings(model)
    warn_of_wrong(reasons)


def switch_all_off(model: Any, reason: str) -> None:
    """Switch all kernels off, until the model is loaded again."""
    on = [key for key, verdict in trials_of(model).all_verdicts.items() if verdict.on]
    switch_off(model, dict.fromkeys(on, reason), remembered=False)
    for site in placed(model):
        site.rows = frozenset()


def failed_kernels(model: Any) -> list[Failed]:
    """List the kernels of a model that do not compile or run, as its trials or a graph have found."""
    found = model.runtime.trials
    verdicts = {} if found is None else found.all_verdicts
    reasons = {key: v.reason for key, v in verdicts.items() if v.reason.startswith(FAILS)}
    reasons |= model.runtime.failed
    lines: dict[tuple[str, str], list[int]] = {}
    for (op, shape, rows), reason in sorted(reasons.items()):
        lines.setdefault((f"{op} {shape}", reason), []).append(rows)
    return [Failed(kernel, tuple(rows), reason) for (kernel, reason), rows in lines.items()]


def drop_recordings(model: Any) -> None:
    """Drop recorded cycles, which hold the launches of a graph that failed."""
    if recorder := model.runtime.recorder:
        recorder.drop()
