"""Switch on the kernels of a loaded model, and list them for the report."""

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast
from uuid import uuid4

import mlx.core as mx

from ..cache.layer_cache import CONTEXTS
from ..kernels import on_metal
from ..kernels.contraction import take
from ..layers.gated_delta import GatedDelta
from ..layers.kernel_site import VERIFY_ROWS, Site
from ..layers.with_heads import WithHeads
from ..machine.remembered import digest
from ..ranks.ordered_sum import parts_alone, sum_over
from .ab_test import LAYERS, KernelTrial, compile_kernel
from .kernel_sites import place
from .kernel_trials import ASKED, DRAWS_OF_FOLLOWING, NOT_TRIED, RIGHT, decide, is_stale
from .kernel_verdict import KernelVerdict, in_words, off
from .lane import LaneChoice, chosen_lane, without_matrix
from .lane_sites import EXACT, MATRIX, MIXED, enter_matrix, have_same_order, leave_matrix
from .not_exact import FORMATS, Lines, others_not_exact, rows_not_exact
from .verdict_file import RememberedVerdicts, TrialFinding, VerdictKey

FIRST_ROWS = 4  # maximum rows of the kernels that a load tries: cycles with up to three drafts
WARM_ROWS = 6  # maximum rows of stored kernels that a load compiles; heads read six with three drafts
MORE_SECONDS = 1.0  # for further trials of a load whose first ones are stored


def switch_on(
    model: Any, lane: str | None, *, lazy: bool = False, kv_bits: Collection[int] = ()
) -> tuple[Lines, Lines]:
    """Switch on the model's kernels; return the report's lines, and the ops whose bits may depend on the row count.

    lane: None takes the `chosen_lane` and decides by trial; "exact" and "matrix" use every kernel of that lane that
    is right; "off" uses none. If a product of "matrix" is wrong, the lane is "exact", with a warning.
    lazy: whether weights are lazy; None then uses no kernel, because a trial would read them. kv_bits: bits of the
    quantized caches that will be used.
    By trial, kernels of the first cycles are decided here, see `try_first`. `runtime.trials` tries others later, and
    those for more than eight rows once `switch_on_for_drafts` or `switch_on_for_batches` is called.
    """
    if not on_metal():
        return ("none: no Metal GPU",), ()
    if not issubclass(type(model), WithHeads):
        return ("none: decoded one row at a time",), ()
    if lane == "off" or (lane is None and lazy):
        why = "asked for" if lane else "a trial would read all of the lazy weights"
        recurrent = any(isinstance(module, GatedDelta) for module in model.modules())
        others = [line for line in others_not_exact(model) if line != FORMATS]
        return (f"none: {why}",), ("all products", *(["the gated delta rule"] if recurrent else []), *others)
    summed = parts_alone(model.modules())  # sites expect the modules of a single machine
    sites = place(model)
    choice = LaneChoice(lane, ASKED) if lane else chosen_lane(model, sites)
    if choice.lane == MATRIX and model.ranks and not have_same_order(model.ranks):
        lane, choice = lane and EXACT, LaneChoice(EXACT, "the GPUs of the ranks add in different orders")
    exact = enter_matrix(model, sites) if choice.lane == MATRIX else []
    for module in summed:
        sum_over(module, module.ranks_group)
    found = _decided(model, sites, kv_bits, lane)
    if exact and (wrong := found.wrong_products()):
        leave_matrix(model, exact)
        choice = without_matrix(model, wrong, remembered=lane is None)
        warnings.warn(str(choice), stacklevel=2)
        found = _decided(model, sites, kv_bits, lane and EXACT)
    model.runtime.trials, found.choice = found, choice
    return found.apply()


def _decided(model: Any, sites: Sequence[Site], kv_bits: Collection[int], lane: str | None) -> "ModelTrials":
    """Return a load's trials, decided, with the same verdicts on all ranks; arguments as of `ModelTrials`."""
    found = ModelTrials(model, sites, kv_bits, lane)
    if lane is not None:
        found.decide(found.trials)
    elif not model.ranks or model.ranks.rank == 0:
        found.try_first()
    else:
        found.try_products(found.trials)
    found.agree()
    return found


def switch_on_for_drafts(model: Any, drafts: int) -> None:
    """Decide on kernels for a verify of this number of drafts of one sequence, once per model, if it is above seven.

    Switches them and updates the report. In a lane all kernels that are right are on. By trial, stored verdicts are
    used, and others are tried for at most MORE_SECONDS, the rest while the model is idle. Call it on all ranks.
    """
    found = model.runtime.trials
    if found and drafts + 1 > VERIFY_ROWS[-1] and found.try_long_rows():
        put_on(model, found)


def switch_on_for_batches(model: Any) -> None:
    """Decide on kernels for the row counts of batches, once per model; switches them and updates the report.

    Nothing happens for a model without trials or split over ranks.
    """
    found = model.runtime.trials
    if found and not model.ranks and found.try_batch_rows():
        put_on(model, found)


def put_on(model: Any, found: "ModelTrials", *, remembered: bool = True) -> None:
    """Apply verdicts to a model's sites and report.

    With a wrong product of "matrix" the lane is "mixed" from now on and, if `remembered`, "exact" in later loads.
    """
    if model.runtime.lane == MATRIX and (wrong := found.wrong_products()):
        found.choice = without_matrix(model, wrong, remembered=remembered and found.lane is None)
        model.runtime.lane, model.runtime.sums = MIXED, uuid4().hex  # no other process has the same mixture
    kernels, not_exact = found.apply()
    if model.report and kernels != model.report.kernels:
        model.runtime.note(kernels=kernels, not_exact=not_exact)
    if model.runtime.row_check:
        model.runtime.row_check.renew()


class ModelTrials:
    """All kernel trials of a loaded model and their verdicts, which only `apply` puts into use.

    lane: the kernels to use: None for those that a trial finds right and faster, "exact" or "matrix" for all of that
    lane that are right. batched: whether `try_batch_rows` was called. choice: the model's lane, for the report.
    """

    def __init__(self, model: Any, sites: Sequence[Site], kv_bits: Collection[int] = (), lane: str | None = None):
        self.model, self.sites, self.dtype, self.lane = model, sites, model.no_hidden().dtype, lane
        self.batched, self.choice = False, cast(LaneChoice | None, None)
        for site in sites:
            site.asked = site.asked or site.format[0] in kv_bits  # type: ignore[attr-defined]
        self.trials: list[KernelTrial] = []
        self.verdicts: dict[VerdictKey, KernelVerdict] = {}
        self._add(trials(sites, self.dtype))
        keys = (f"{len(trial.pairs)} {trial.key}" for trial in self.trials)
        self.remembered = RememberedVerdicts(digest([model.runtime.lane_key, *keys]))

    @classmethod
    def of_sites(cls, model: Any, sites: Sequence[Site]) -> "ModelTrials":
        """Return trials, of which none has run, for sites whose kernels were switched on or off without trials.

        Their verdicts state whether each kernel is on now. Trials above eight rows are included.
        """
        found = cls(model, sites)
        found.add_more_rows()
        on = {(site.op, _typed(site.shape, found.dtype), m) for site in sites for m in site.rows}
        split = {(site.op, _typed(site.shape, found.dtype), m) for site in sites for m in site.split}
        for trial in found.trials:
            key = trial.base or trial.key
            found.verdicts[trial.key] = KernelVerdict(key in on, key in on, reason=ASKED, split=key in split)
        return found

    @property
    def more_rows(self) -> set[int]:
        """The row counts above eight that have trials, none before they are added."""
        return {trial.rows for trial in self.trials if trial.rows > VERIFY_ROWS[-1]}

    def reject(self, key: VerdictKey, reason: str, *, remembered: bool) -> None:
        """Mark a kernel as failed, in all contexts; `apply` then switches it off.

        remembered: also for later loads.
        """
        contexts, split = [trial.key for trial in self.trials if trial.base == key], self.verdicts[key].split
        self.verdicts |= dict.fromkeys([key, *contexts], off(reason))
        if remembered:
            self.remembered.add({key: TrialFinding(reason, None, split=split)})

    def try_first(self) -> None:
        """Decide on all products of the lane "matrix", whatever time that takes, and on the kernels of first cycles.

        If none of these is untried and findings were stored before, decide on others for MORE_SECONDS. Then compile
        kernels of up to WARM_ROWS rows that are on by a stored time, or are such products.
        """
        known, first = self.remembered.recall(), [t for t in self.needed() if t.rows <= FIRST_ROWS and not t.untimed]
        self.try_products(self.trials)
        self.decide(first)
        if known and not self.has_untried(first):
            end = time.monotonic() + MORE_SECONDS
            self.try_rest(lambda: time.monotonic() > end)
        for trial in self.needed():
            decided = known.get(trial.key, RIGHT) != RIGHT or (known and trial.untimed)
            if decided and trial.rows <= WARM_ROWS and (verdict := self.verdicts[trial.key]).on:
                compile_kernel(trial.chosen(verdict.split))

    def try_products(self, among: Iterable[KernelTrial]) -> None:
        """Decide on the products of the lane "matrix" among these trials, whatever time that takes."""
        if products := [trial for trial in among if trial.untimed]:
            self.decide(products, budget=math.inf)

    def try_rest(self, stop: Callable[[], bool]) -> None:
        """Run the remaining trials of needed kernels until `stop` returns True or BUDGET seconds are used up."""
        if self.has_untried(needed := self.needed()):
            self.decide(needed, stop=stop)

    def add_more_rows(self) -> bool:
        """Add the trials of more than eight rows; return False if there are none to add, as after the first call."""
        more = [t for t in more_trials(self.sites, self.dtype) if t.key not in self.verdicts]
        self._add(more)
        return bool(more)

    def _add(self, more: list[KernelTrial]) -> None:
        self.trials += more
        asked = {trial.key for trial in self.needed()}
        reasons = (f"{NOT_TRIED} yet" if t.key in asked else f"{NOT_TRIED}, as nothing uses it" for t in more)
        self.verdicts |= {trial.key: off(reason) for trial, reason in zip(more, reasons, strict=True)}

    def try_long_rows(self) -> bool:
        """Decide on kernels for more than eight rows of one sequence.

        By trial, stored verdicts are used; further trials take at most MORE_SECONDS, and none is made while kernels
        of fewer rows are untried. Returns False if their trials were added before, or there are none.
        """
        end = time.monotonic() + (0.0 if self.has_untried(self.needed()) else MORE_SECONDS)
        if not self.add_more_rows():
            return False
        if self.lane is not None:
            self._decide_more()
        elif not self.model.ranks or self.model.ranks.rank == 0:
            self._decide_more(stop=lambda: time.monotonic() >= end)
        self.agree()
        return True

    def try_batch_rows(self) -> bool:
        """Decide on kernels for the row counts of batches.

        Returns False if that was done before, or none is untried.
        """
        if self.batched:
            return False
        self.batched = True
        self.add_more_rows()
        return self._decide_more()

    def _decide_more(self, **how: Any) -> bool:
        """Decide on untried kernels for more than eight rows, in a lane also on those that nothing uses.

        Returns False if none was untried. how: keyword arguments of `kernel_trials.decide`.
        """
        more = self.more_rows
        among = self.needed() if self.lane is None else self.trials
        untried = [trial for trial in among if trial.rows in more and self.has_untried([trial])]
        if self.lane is None:
            self.try_products(untried)
        if left := [trial for trial in untried if self.has_untried([trial])]:
            self.decide(left, **how)
        return bool(untried)

    def needed(self) -> list[KernelTrial]:
        """Return the trials of all kernels that something in use needs, tried or not."""
        ops = {site.op for site in self.sites if site.asked}
        return [trial for trial in self.trials if trial.op in ops]

    def has_untried(self, trials: Iterable[KernelTrial]) -> bool:
        """Return whether any of these trials, all of this object, has not been made, as for lack of time."""
        return any(self.verdicts[trial.key].reason.startswith(NOT_TRIED) for trial in trials)

    def wrong_products(self) -> str:
        """Return which product of the lane "matrix" is wrong, and why; "" if none is, or none was tried."""
        tried = ((t, self.verdicts[t.key]) for t in self.trials if t.untimed and not self.has_untried([t]))
        return next((f"{t.op} {t.shape}, M={t.rows}: {v.reason}" for t, v in tried if not v.right), "")

    def apply(self) -> tuple[Lines, Lines]:
        """Switch the sites by the verdicts; return the report's lines, and those of ops that may not be exact."""
        switch(self.sites, self.verdicts, self.dtype)
        not_exact = *rows_not_exact(self.sites, self.more_rows), *others_not_exact(self.model)
        return (*([str(self.choice)] if self.choice else []), *in_words(self.verdicts)), not_exact

    def agree(self) -> None:
        """If the model is split over ranks, use rank 0's verdicts on all, because rows need the same bits.

        A kernel that is wrong on any rank is off on all.
        """
        if not self.model.ranks:
            return
        first, *others = self.model.ranks.gather_values(
            [(key, vars(verdict)) for key, verdict in self.verdicts.items()]
        )
        agreed = {tuple(key): KernelVerdict(**facts) for key, facts in first}
        tried = (item for verdicts in others for item in verdicts if not item[1]["reason"].startswith(NOT_TRIED))
        agreed |= {tuple(key): KernelVerdict(**facts) for key, facts in tried if not facts["right"]}
        self.verdicts = cast(dict[VerdictKey, KernelVerdict], agreed)
        for (op, *_), verdict in self.verdicts.items():
            if verdict.right:
                take(op, verdict.spelling)

    def decide(self, trials: list[KernelTrial], **how: Any) -> None:
        """Set the verdicts of these trials, from the file of findings or by running them.

        Verdicts of a spelling of multiply-adds that is no longer in use are decided again. how: keyword arguments of
        `kernel_trials.decide`.
        """
        self.verdicts |= decide(trials, lane=self.lane, remembered=self.remembered, **how)
        tried = [trial for trial in self.trials if not self.has_untried([trial])]
        if again := [trial for trial in tried if is_stale(trial.key, self.verdicts[trial.key])]:
            self.decide(again, **how)


def trials(sites: Sequence[Site], dtype: mx.Dtype, rows: str = "candidates") -> list[KernelTrial]:
    """Return one trial per op, shape and number of rows, over all sites of that shape, for x of `dtype`.

    Sites with `at_contexts` have one more for each of these contexts. rows: the attribute of sites that lists the row
    counts, "candidates" or "together". Small row counts come first, ops of quantized caches last.
    """
    alike: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        alike.setdefault((site.op, site.shape), []).append(site)
    found = []
    for (op, shape), same in alike.items():
        found += _of_shape(same, op, _typed(shape, dtype), dtype, rows)
        for context in getattr(same[0], "at_contexts", ()):
            of_context = [site.at_contexts[context] for site in same[:LAYERS]]  # type: ignore[attr-defined]
            for trial in _of_shape(of_context, op, in_context(_typed(shape, dtype), context), dtype, rows):
                base = (op, _typed(shape, dtype), trial.rows)
                found.append(replace(trial, base=base, draws=DRAWS_OF_FOLLOWING))
    of_caches = {site.op for site in sites if getattr(site, "format", None)}
    return sorted(found, key=lambda trial: (trial.op in of_caches, trial.rows))


def more_trials(sites: Sequence[Site], dtype: mx.Dtype) -> list[KernelTrial]:
    """Return the `trials` of more than eight rows."""
    return trials(sites, dtype, "together")


def _of_shape(sites: Sequence[Site], op: str, shape: str, dtype: mx.Dtype, rows: str) -> list[KernelTrial]:
    first = sites[0]
    more: dict[str, Any] = {
        name: [getattr(site, name) for site in sites] for name in ("alone", "truth") if hasattr(first, name)
    }
    more |= {"untimed": first.matrix, "kind": first.kind, "weights": len(sites) * first.weights_read}
    found = []
    for n in getattr(first, rows):
        pairs = [(partial(s.computed, split=False) if s.splits(n) else s.ours, s.stock) for s in sites]
        split = [partial(site.computed, split=True) for site in sites if site.splits(n)]
        found.append(KernelTrial(op, shape, n, pairs, first.width, dtype, split=split, **more))
    return found


def in_context(shape: str, context: int) -> str:
    """Return a shape's description with "below N positions" for context 0, else "from N positions".

    context: one of CONTEXTS.
    """
    return f"{shape} below {CONTEXTS[1]} positions" if context == CONTEXTS[0] else f"{shape} from {context} positions"


def _typed(shape: str, dtype: mx.Dtype) -> str:
    return f"{shape} {str(dtype).rpartition('.')[2]}"


def switch(sites: Iterable[Site], verdicts: Mapping[VerdictKey, KernelVerdict], dtype: mx.Dtype) -> None:
    """Set each site's `rows`, `split` and `rows_of_context` by the verdicts; row counts without one are off."""
    for site in sites:
        shape = _typed(site.shape, dtype)
        site.rows = _on(site, shape, verdicts)
        site.split = frozenset(m for m in site.every_count if (v := verdicts.get((site.op, shape, m))) and v.split)
        contexts = getattr(site, "at_contexts", {})
        site.rows_of_context = {c: _on(site, in_context(shape, c), verdicts) for c in contexts}
        for tried in contexts.values():
            tried.rows = frozenset()  # frees the inputs of its trials
    mx.clear_cache()


def _on(site: Site, shape: str, verdicts: Mapping[VerdictKey, KernelVerdict]) -> frozenset[int]:
    tried = (rows for rows in site.every_count if (site.op, shape, rows) in verdicts)
    return frozenset(rows for rows in tried if verdicts[site.op, shape, rows].on)
