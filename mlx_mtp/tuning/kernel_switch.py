"""Switch on the kernels that a loaded model runs with, and report which they are."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import SwitchLinear

from ..kernels import on_metal
from ..layers.attention import VerifyAttention
from ..layers.gated_delta import GatedDelta
from ..layers.kernel_site import Site, inexact_rows
from ..layers.mamba2 import Mamba2
from ..layers.port import Port
from ..layers.products import Matrices, Stack
from ..machine.remembered import digest
from .kernel_sites import place, tied
from .kernel_trials import KernelTrial, KernelVerdict, Key, RememberedVerdicts, decide, in_words

FORMATS = "products in a format without a kernel"
Lines = tuple[str, ...]


def switch_on(model: Any, lane: str | None, *, lazy: bool = False) -> tuple[Lines, Lines]:
    """Switch on the model's kernels: the report's lines, and the ops whose bits may depend on the number of rows.

    lane: None decides by trial, "exact" and "fast" take what is right, "fast" also products by matrices where a trial
    finds them faster, "off" takes none. Without a Metal GPU, or for a model that verifies nothing, all stays as it
    is; by trial also with `lazy` weights, which a trial would read.
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
    sites = place(model)
    verdicts = _switched(model, sites, lane)
    if lane == "fast":
        # Where matrices are faster than the exact kernels, which are on by now.
        matrices: list[Site] = [Matrices(site) for site in sites if isinstance(site, Stack)]
        verdicts |= _switched(model, matrices, None)
        sites += matrices
    return in_words(verdicts), (*rows_not_exact(sites), *others_not_exact(model))


def _switched(model: Port, sites: Sequence[Site], lane: str | None) -> dict[Key, KernelVerdict]:
    """Decide on the sites' kernels, by what an earlier load found where it is remembered, and switch them."""
    dtype = model.no_hidden().dtype
    tried = trials(sites, dtype)
    shapes = digest(f"{len(trial.pairs)} {trial.key}" for trial in tried)
    verdicts = decide(tried, lane=lane, remembered=RememberedVerdicts(shapes))
    switch(sites, verdicts, dtype)
    return verdicts


def trials(sites: Sequence[Site], dtype: mx.Dtype) -> list[KernelTrial]:
    """Make one trial per op, shape and number of rows, over all sites of that shape, for x of `dtype`.

    The fewest rows come first, and last what is asked for seldom.
    """
    alike: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        alike.setdefault((site.op, site.shape), []).append(site)
    found = []
    for (op, shape), same in alike.items():
        first, pairs = same[0], [(site.ours, site.stock) for site in same]
        own = {name: [getattr(site, name) for site in same] for name in ("alone", "truth") if hasattr(first, name)}
        typed, bits = f"{shape} {str(dtype).rpartition('.')[2]}", getattr(first, "bits", True)
        found += [KernelTrial(op, typed, n, pairs, first.width, dtype, bits=bits, **own) for n in first.candidates]
    seldom = {site.op for site in sites if getattr(site, "seldom", False)}
    return sorted(found, key=lambda trial: (trial.op in seldom, trial.rows))


def switch(sites: Iterable[Site], verdicts: Mapping[Key, KernelVerdict], dtype: mx.Dtype) -> None:
    """Let each site serve the row counts that its verdicts allow."""
    for site in sites:
        site.rows = frozenset(trial.rows for trial in trials([site], dtype) if verdicts[trial.key].on)
    mx.clear_cache()  # of what the trials made


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
        "latent attention's products per head": any(type(m) in (MultiLinear, QuantizedMultiLinear) for m in modules),
        "Mamba2's convolution": any(isinstance(m, Mamba2) for m in modules),
        "unquantized experts": any(type(m) is SwitchLinear for m in modules),  # sorted from 64 of them on
        "adapters": any("lora_a" in m for m in modules),
    }
    return tuple(name for name, present in found.items() if present)
