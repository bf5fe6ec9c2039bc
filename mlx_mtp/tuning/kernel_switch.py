"""Switch on the kernels that a loaded model runs with, and report which they are."""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import SwitchLinear

from ..cache.layer_cache import CONTEXTS
from ..kernels import on_metal
from ..kernels.contraction import take
from ..layers.attention import VerifyAttention
from ..layers.gated_delta import GatedDelta
from ..layers.kernel_site import Site, inexact_rows
from ..layers.mamba2 import Mamba2
from ..layers.port import Port
from ..layers.products import Matrices, Stack
from ..layers.sparse_mla import SparseMLA
from ..machine.remembered import digest
from ..ranks.ordered_sum import parts_alone, sum_over
from .ab_test import LAYERS, Op, compile_kernel
from .kernel_sites import place, tied
from .kernel_trials import (
    ASKED,
    DRAWS_OF_FOLLOWING,
    NOT_TRIED,
    RIGHT,
    Found,
    KernelTrial,
    Key,
    RememberedVerdicts,
    decide,
    is_stale,
)
from .kernel_verdict import KernelVerdict, in_words, off

FIRST_ROWS = 4  # at most, of cycles that a load decides on: of up to three drafts
WARM_ROWS = 6  # at most, of kernels that a load compiles where they are remembered: with three drafts heads read six
MORE_SECONDS = 1.0  # of a load that finds all that remembered, for what is left
FORMATS = "products in a format without a kernel"
Lines = tuple[str, ...]


def switch_on(
    model: Any, lane: str | None, *, lazy: bool = False, kv_bits: Collection[int] = ()
) -> tuple[Lines, Lines]:
    """Switch on the model's kernels: the report's lines, and the ops whose bits may depend on the number of rows.

    lane: None decides by trial, "exact" and "fast" take what is right, "fast" also products by matrices where a trial
    finds them faster, "off" takes none. Without a Metal GPU, or for a model that verifies nothing, all stays as it
    is; by trial also with `lazy` weights, which a trial would read. kv_bits: of quantized caches that will be used.
    By trial, what the first cycles use is decided here; the rest waits in the model's `runtime.trials`, and in any
    lane the rows of several texts (`switch_on_for_batches`).
    """
    if not on_metal():
        return ("none: no Metal GPU",), ()
    if not isinstance(model, Port):
        return ("none: decoded one row at a time",), ()
    if lane == "off" or (lane is None and lazy):
        why = "asked for" if lane else "a trial would read all of the lazy weights"
        recurrent = any(isinstance(module, GatedDelta) for module in model.modules())  # type: ignore[attr-defined]
        others = [line for line in others_not_exact(model) if line != FORMATS]
        return (f"none: {why}",), ("all products", *(["the gated delta rule"] if recurrent else []), *others)
    summed = parts_alone(model.modules())  # so that kernels are placed as on one machine
    found = ModelTrials(model, place(model), kv_bits, lane)
    for module in summed:
        sum_over(module, module.ranks_group)
    model.runtime.trials = found
    if lane is not None:
        found.decide(found.trials)
    elif not model.ranks or model.ranks.rank == 0:
        found.begin()
    found.agree()
    if lane == "fast":
        # Where matrices are faster than the exact kernels, which have to be on by then.
        found.switched()
        found.matrices = ModelTrials(model, [Matrices(site) for site in found.sites if isinstance(site, Stack)])
        found.matrices.decide(found.matrices.trials)
        found.matrices.agree()
    return found.switched()


def switch_on_for_batches(model: Any) -> None:
    """Try the kernels that are not tried yet for the rows of several texts; what is on changes, and the report."""
    found = model.runtime.trials
    if found and not model.ranks and found.go_together():
        put_on(model, found)


def put_on(model: Any, found: "ModelTrials") -> None:
    """Let the sites of a model serve what its trials have found since, and its report say so."""
    kernels, not_exact = found.switched()
    if model.report and kernels != model.report.kernels:
        model.runtime.note(kernels=kernels, not_exact=not_exact)


class ModelTrials:
    """The trials of a loaded model: at the load those of the first cycles, later, while nobody waits, the others.

    verdicts: of all so far. Kernels change in `switched` only, so that an answer has the same ones throughout.
    lane: as `switch_on` has it. matrices: the trials of products by matrices, where the lane has them.
    """

    def __init__(self, model: Port, sites: Sequence[Site], kv_bits: Collection[int] = (), lane: str | None = None):
        self.model, self.sites, self.dtype, self.lane = model, sites, model.no_hidden().dtype, lane
        self.matrices: ModelTrials | None = None
        for site in sites:
            site.asked = site.asked or site.format[0] in kv_bits  # type: ignore[attr-defined]
        self.trials = trials(sites, self.dtype)
        self.remembered = RememberedVerdicts(digest(f"{len(trial.pairs)} {trial.key}" for trial in self.trials))
        self.verdicts = {trial.key: off(f"{NOT_TRIED}, as nothing uses it") for trial in self.trials}
        self.verdicts |= {trial.key: off(f"{NOT_TRIED} yet") for trial in self.asked()}

    @classmethod
    def of_sites(cls, model: Port, sites: Sequence[Site]) -> "ModelTrials":
        """Make the trials of sites that were switched on without any, as those that found it right."""
        found = cls(model, sites)
        found.trials += trials(sites, found.dtype, "together")
        none: frozenset[int] = frozenset()
        rows: dict[tuple[str, str], tuple[frozenset[int], frozenset[int]]] = {}
        for site in sites:
            key = site.op, _typed(site.shape, found.dtype)
            on, split = rows.get(key, (none, none))
            rows[key] = on | site.rows, split | site.split
        for trial in found.trials:
            on, split = (trial.rows in of for of in rows[(trial.base or trial.key)[:2]])
            found.verdicts[trial.key] = KernelVerdict(on, on, reason=ASKED, split=split)
        return found

    @property
    def all_trials(self) -> list[KernelTrial]:
        """The trials, and those of products by matrices."""
        return [*self.trials, *(self.matrices.trials if self.matrices else ())]

    @property
    def all_verdicts(self) -> dict[Key, KernelVerdict]:
        """The verdicts of `all_trials`."""
        return {**self.verdicts, **(self.matrices.verdicts if self.matrices else {})}

    def reject(self, key: Key, reason: str, *, remembered: bool) -> None:
        """Note, for later loads too if asked for, that a kernel failed; it is off from the next `switched` on."""
        if self.matrices and key in self.matrices.verdicts:
            return self.matrices.reject(key, reason, remembered=remembered)
        contexts, split = [trial.key for trial in self.trials if trial.base == key], self.verdicts[key].split
        self.verdicts |= dict.fromkeys([key, *contexts], off(reason))
        if remembered:
            self.remembered.add({key: Found(reason, None, split=split)})

    def begin(self) -> None:
        """Decide on what the first cycles use; where all of that is remembered, let it be compiled, and go on."""
        known, first = self.remembered.recall(), [trial for trial in self.asked() if trial.rows <= FIRST_ROWS]
        self.decide(first)
        if known and not self.waiting(first):
            end = time.monotonic() + MORE_SECONDS
            self.go_on(lambda: time.monotonic() > end)
        for trial in self.asked():
            timed = known.get(trial.key, RIGHT) != RIGHT and trial.rows <= WARM_ROWS
            if timed and (verdict := self.verdicts[trial.key]).on:
                compile_kernel(trial.chosen(verdict.split))

    def go_on(self, stop: Callable[[], bool]) -> None:
        """Try what is left, until `stop` says that somebody waits."""
        if self.waiting(asked := self.asked()):
            self.decide(asked, stop=stop)

    def go_together(self) -> bool:
        """Try what several texts in one pass ask for; tell whether any of that is new."""
        more = [t for t in trials(self.sites, self.dtype, "together") if t.key not in self.verdicts]
        if not more:
            return False
        self.trials += more
        self.verdicts |= {trial.key: off(f"{NOT_TRIED} yet") for trial in more}
        self.decide(more)
        if self.matrices:
            self.switched()
            self.matrices.go_together()
        return True

    def asked(self) -> list[KernelTrial]:
        """List the trials of all kernels that anything asks for."""
        ops = {site.op for site in self.sites if site.asked}
        return [trial for trial in self.trials if trial.op in ops]

    def waiting(self, trials: Iterable[KernelTrial]) -> bool:
        """Tell whether any of these has not been made."""
        return any(self.verdicts[trial.key].reason.startswith(NOT_TRIED) for trial in trials)

    def switched(self) -> tuple[Lines, Lines]:
        """Let the sites serve what the verdicts allow; returns what `switch_on` does."""
        switch(self.sites, self.verdicts, self.dtype)
        lines, sites = in_words(self.verdicts), [*self.sites]
        if self.matrices:
            lines += self.matrices.switched()[0]
            sites += self.matrices.sites
        return lines, (*rows_not_exact(sites), *others_not_exact(self.model))

    def agree(self) -> None:
        """Take rank 0's verdicts, where the model is split over ranks: rows have to have the same bits on all.

        A kernel that another rank has seen to be wrong is off on all of them.
        """
        if not self.model.ranks:
            return
        first, *others = self.model.ranks.gather_values(
            [(key, vars(verdict)) for key, verdict in self.verdicts.items()]
        )
        told = {tuple(key): KernelVerdict(**facts) for key, facts in first}
        tried = (item for verdicts in others for item in verdicts if not item[1]["reason"].startswith(NOT_TRIED))
        told |= {tuple(key): KernelVerdict(**facts) for key, facts in tried if not facts["right"]}
        self.verdicts = cast(dict[Key, KernelVerdict], told)
        for (op, *_), verdict in self.verdicts.items():
            if verdict.right:
                take(op, verdict.spelling)

    def decide(self, trials: list[KernelTrial], **how: Any) -> None:
        """Decide on these, by what an earlier load found where it is remembered.

        Where an op takes another spelling of its multiply-adds, what was found with the last one is decided again.
        """
        self.verdicts |= decide(trials, lane=self.lane, remembered=self.remembered, **how)
        tried = [trial for trial in self.trials if not self.waiting([trial])]
        if again := [trial for trial in tried if is_stale(trial.key, self.verdicts[trial.key])]:
            self.decide(again, **how)


def trials(sites: Sequence[Site], dtype: mx.Dtype, rows: str = "candidates") -> list[KernelTrial]:
    """Make one trial per op, shape and number of rows, over all sites of that shape, for x of `dtype`.

    rows: the sites' attribute that has the numbers, "candidates" or "together". The fewest come first, and last what
    is asked for seldom, quantized caches.
    """
    alike: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        alike.setdefault((site.op, site.shape), []).append(site)
    found = []
    for (op, shape), same in alike.items():
        found += _of_shape(same, op, _typed(shape, dtype), dtype, rows)
        for context in getattr(same[0], "at_contexts", ()):
            of_context = [site.at_contexts[context] for site in same[:LAYERS]]  # type: ignore[attr-defined]
            own = _of_shape(of_context, op, in_context(_typed(shape, dtype), context), dtype, rows)
            found += [
                replace(trial, base=(op, _typed(shape, dtype), trial.rows), draws=DRAWS_OF_FOLLOWING) for trial in own
            ]
    seldom = {site.op for site in sites if getattr(site, "format", None)}
    return sorted(found, key=lambda trial: (trial.op in seldom, trial.rows))


def _of_shape(sites: Sequence[Site], op: str, shape: str, dtype: mx.Dtype, rows: str) -> list[KernelTrial]:
    first = sites[0]
    own: dict[str, Any] = {
        name: [getattr(site, name) for site in sites] for name in ("alone", "truth") if hasattr(first, name)
    }
    own |= {"bits": getattr(first, "bits", True), "kind": first.kind, "weights": len(sites) * first.weights_read}
    return [
        KernelTrial(op, shape, n, _pairs(sites, n), first.width, dtype, split=_split(sites, n), **own)
        for n in getattr(first, rows)
    ]


def _pairs(sites: Sequence[Site], rows: int) -> list[tuple[Op, Op]]:
    """List (ours, stock) of sites, whose rows are not split."""
    return [(partial(s.computed, split=False) if s.splits(rows) else s.ours, s.stock) for s in sites]


def _split(sites: Sequence[Site], rows: int) -> list[Op]:
    """List the kernels that split their rows, where they can."""
    return [partial(site.computed, split=True) for site in sites if site.splits(rows)]


def in_context(shape: str, context: int) -> str:
    """Say a shape in texts of a length of CONTEXTS, of the shortest and the longest ones."""
    return f"{shape} below {CONTEXTS[1]} positions" if context == CONTEXTS[0] else f"{shape} from {context} positions"


def _typed(shape: str, dtype: mx.Dtype) -> str:
    return f"{shape} {str(dtype).rpartition('.')[2]}"


def switch(sites: Iterable[Site], verdicts: Mapping[Key, KernelVerdict], dtype: mx.Dtype) -> None:
    """Let each site serve the row counts that its verdicts allow."""
    for site in sites:
        shape = _typed(site.shape, dtype)
        site.rows = _on(site, shape, verdicts)
        tried = (*site.candidates, *site.together)
        site.split = frozenset(m for m in tried if (v := verdicts.get((site.op, shape, m))) and v.split)
        contexts = getattr(site, "at_contexts", {})
        site.rows_of_context = {c: _on(site, in_context(shape, c), verdicts) for c in contexts}
        for tried in contexts.values():
            tried.rows = frozenset()  # lets go of what its trials made
    mx.clear_cache()  # of what the trials made


def _on(site: Site, shape: str, verdicts: Mapping[Key, KernelVerdict]) -> frozenset[int]:
    tried = (rows for rows in (*site.candidates, *site.together) if (site.op, shape, rows) in verdicts)
    return frozenset(rows for rows in tried if verdicts[site.op, shape, rows].on)


def rows_not_exact(sites: Sequence[Site]) -> Lines:
    """Say at which numbers of rows M a row may have other bits than alone, in a line per op."""
    off: dict[str, list[set[int]]] = {}
    covered = {id(getattr(site, "covers", None)): site.rows for site in sites}
    for site in sites:
        if rows := inexact_rows(site) - covered.get(id(site), frozenset()):
            off.setdefault(site.op, []).append(rows)
    return tuple(
        f"{len(found)} layers' {op} at M={', '.join(map(str, sorted(set().union(*found))))}"
        for op, found in off.items()
    )


def others_not_exact(model: Any) -> Lines:
    """Name what of a model has no exact kernel."""
    modules = [module for _, module in model.named_modules()]
    attentions = [m for m in modules if "o_proj" in m]
    found = {
        FORMATS: any(type(m) in (nn.QuantizedLinear, nn.QQLinear) or tied(model, m) for m in modules),
        "attention": any(not isinstance(m, VerifyAttention) and not getattr(m, "latent", None) for m in attentions),
        "the choice of sparse attention": any(isinstance(m, SparseMLA) for m in modules),
        "latent attention's products per head": any(type(m) in (MultiLinear, QuantizedMultiLinear) for m in modules),
        "Mamba2's convolution": any(isinstance(m, Mamba2) for m in modules),
        "unquantized experts": any(type(m) is SwitchLinear for m in modules),  # sorted from 64 of them on
        "adapters": any("lora_a" in m for m in modules),
    }
    return tuple(name for name, present in found.items() if present)
