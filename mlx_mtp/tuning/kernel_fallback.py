"""Switch off kernels that Metal refuses; from the next graph on, MLX's own operations replace them."""

import warnings
from contextlib import suppress
from typing import Any, NamedTuple

from ..kernels import KernelRefused, Refusal, launched, on_metal, out_of_memory, run_again, run_new
from ..machine.errors import refusal
from .ab_test import FAILS, KernelTrial, failing
from .kernel_switch import ModelTrials, put_on
from .kernel_trials import warn_of_wrong
from .verdict_file import VerdictKey

WITHOUT_TRIAL = ("change_logits", "choose_rows")  # on, also without a trial, while `Runtime.choosing`


class FailedKernel(NamedTuple):
    """A kernel that is off because it does not compile or run. kernel: op and shape. rows: its row counts."""

    kernel: str
    rows: tuple[int, ...]
    reason: str


class GraphFailed(RuntimeError):
    """Raised if MLX raised `error` during the evaluation of a graph; arrays written in place may be lost."""

    def __init__(self, error: Exception):
        super().__init__(refusal(error))
        self.error = error


TROUBLE = (KernelRefused, GraphFailed)
Trouble = KernelRefused | GraphFailed


def run_first(model: Any, refused: KernelRefused | None = None) -> None:
    """Run the kernels that the next graph of `model` would launch for the first time, before the graph is evaluated.

    Raises KernelRefused, on every rank, if Metal refuses one. refused: an exception already raised while the graph
    was built; nothing is run then.
    """
    refused = refused or newly_refused()
    if ranks := model.ranks:
        if any(number for (number,) in ranks.gather([refused is not None])):
            raise KernelRefused(refused.refusals if refused else [], voted=True)
    elif refused:
        raise refused


def vote(model: Any, error: Trouble) -> None:
    """Report a refused kernel of this rank to the other ranks, which wait in `run_first` for it.

    Nothing happens on a single rank, for an error that all ranks have, or for a failed graph.
    """
    if model.ranks and isinstance(error, KernelRefused) and not error.voted:
        with suppress(KernelRefused):
            run_first(model, error)


def newly_refused() -> KernelRefused | None:
    """Run the kernels that this thread has launched for the first time; return the exception if one is refused.

    None if none is refused; a lack of memory is no refusal.
    """
    try:
        run_new()
    except KernelRefused as e:
        return e
    return None


class Fallback:
    """Handles kernel errors of one generation. after: number of tokens at the last failure of a whole graph."""

    def __init__(self, model: Any):
        self.model, self.after = model, -1

    def take(self, error: Trouble, tokens: int) -> None:
        """Switch off the kernels that may have caused an error, which occurred after this number of tokens.

        A graph may fail although each of its kernels runs alone. The graph is then built once more with the same
        kernels, and without any kernels if it fails again after as many tokens. Raises KernelRefused if no kernel is
        on; for a GraphFailed MLX's error, if no kernel is on, on several ranks, or for lack of memory.
        """
        if isinstance(error, KernelRefused):
            return fall_back(self.model, error)
        # On several ranks the others wait within the graph.
        if self.model.ranks or not any_on(self.model) or out_of_memory(str(error.error)):
            raise error.error
        if refusals := run_again():
            return fall_back(self.model, KernelRefused(refusals))
        if self.after == tokens:
            return switch_all_off(self.model, failing(error.error))
        self.after = tokens
        drop_recordings(self.model)
        warnings.warn(f"a graph with kernels {failing(error.error)}; it is built again", stacklevel=2)


def any_on(model: Any) -> bool:
    """Return whether a kernel of a model is on."""
    return (model.runtime.choosing and on_metal()) or any(site.rows for site in model.runtime.sites)


def trials_of(model: Any) -> ModelTrials:
    """Return the trials of a model's load; if sites were switched on without any, trials made from these sites."""
    return model.runtime.trials or ModelTrials.of_sites(model, model.runtime.sites)


def fall_back(model: Any, error: KernelRefused) -> None:
    """Switch off, on every rank, the kernels that launch the refused ones, else those of the same op, else all.

    Raises the error if no kernel is on.
    """
    blamed = blame(trials_of(model), error.refusals)
    if ranks := model.ranks:
        gathered = ranks.gather_values([[*key, reason] for key, reason in blamed.items()])
        blamed = {(op, shape, rows): reason for found in gathered for op, shape, rows, reason in found}
    if blamed:
        switch_off(model, blamed)
    elif any_on(model):
        switch_all_off(model, failing(error))
    else:
        raise error


def blame(found: ModelTrials, refusals: list[Refusal]) -> dict[VerdictKey, str]:
    """Return the kernels that are on and launch a refused one: (op, shape, rows) with the reason.

    A launch that no trial makes is attributed to all kernels of its op, an unknown op to all kernels. Those
    WITHOUT_TRIAL have the shape "logits".
    """
    live = [trial for trial in found.trials if found.verdicts[trial.key].on]
    launches = {trial.key: launches_of(trial.chosen(found.verdicts[trial.key].split)) for trial in live}
    blamed: dict[VerdictKey, str] = {}
    for refused in refusals:
        op = refused.key[0]
        if op in WITHOUT_TRIAL:
            blamed[op, "logits", 1] = failing(refused.error)
            continue
        exact = [key for key, keys in launches.items() if refused.key in keys]
        alike = [key for key, keys in launches.items() if op in (key[0], *(launch[0] for launch in keys))]
        blamed |= dict.fromkeys(exact or alike or launches, failing(refused.error))
    return blamed


def launches_of(trial: KernelTrial) -> set[tuple]:
    """Return the keys of the launches of a trial's graph on its first layer; nothing is evaluated.

    After an error, as if a launch is refused, the later ones are missing.
    """
    with launched() as keys:
        try:
            trial.pairs[0][0](trial.x(0))
        except (RuntimeError, ValueError) as e:  # refused, or memory is short; later launches are unknown
            keys += [refused.key for refused in getattr(e, "refusals", ())]
    return set(keys)


def switch_off(model: Any, reasons: dict[VerdictKey, str], *, remembered: bool = True) -> None:
    """Switch kernels off, with a warning; the report lists the reasons, and recorded cycles are dropped.

    reasons: by (op, shape, rows). remembered: whether later loads leave them off.
    """
    found = trials_of(model)
    for key, reason in reasons.items():
        if key[0] in WITHOUT_TRIAL:
            model.runtime.choosing = False
        else:
            found.reject(key, reason, remembered=remembered)
    model.runtime.failed |= reasons
    put_on(model, found, remembered=remembered)
    drop_recordings(model)
    warn_of_wrong(reasons)


def switch_all_off(model: Any, reason: str) -> None:
    """Switch off all kernels of this model, for this reason; later loads of it try them again."""
    on = [key for key, verdict in trials_of(model).verdicts.items() if verdict.on]
    switch_off(model, dict.fromkeys(on, reason), remembered=False)
    model.runtime.choosing = False
    for site in model.runtime.sites:
        site.rows = frozenset()


def failed_kernels(model: Any) -> list[FailedKernel]:
    """Return a model's kernels that are off because they did not compile or run, in a trial or in a generation.

    If the failed kernel of a generation's graph is unknown, these are all that were on, or all of its op. One entry
    per op, shape and reason, with all its row counts.
    """
    trials = model.runtime.trials
    verdicts = {} if trials is None else trials.verdicts
    reasons = {key: v.reason for key, v in verdicts.items() if v.reason.startswith(FAILS)}
    reasons |= model.runtime.failed
    lines: dict[tuple[str, str], list[int]] = {}
    for (op, shape, rows), reason in sorted(reasons.items()):
        lines.setdefault((f"{op} {shape}", reason), []).append(rows)
    return [FailedKernel(kernel, tuple(rows), reason) for (kernel, reason), rows in lines.items()]


def drop_recordings(model: Any) -> None:
    """Delete recorded cycles, which contain the launches of a graph that failed."""
    if recorder := model.runtime.recorder:
        recorder.drop()
