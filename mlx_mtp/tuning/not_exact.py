"""Name a loaded model's operations whose rows may have other bits in a pass of several rows than alone."""

from collections.abc import Collection, Sequence
from typing import Any

import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import SwitchLinear

from ..layers.attention import VerifyAttention
from ..layers.blocks import BlockMultiLinear
from ..layers.kernel_site import Site, inexact_rows
from ..layers.made import Made
from ..layers.mamba2 import Mamba2
from ..layers.sparse_mla import SparseMLA
from .kernel_sites import LINEARS, tied

FORMATS = "products in a format without a kernel"
PER_HEAD = MultiLinear, QuantizedMultiLinear, BlockMultiLinear
Lines = tuple[str, ...]


def rows_not_exact(sites: Sequence[Site], more: Collection[int] = ()) -> Lines:
    """Return a line per op with the row counts M at which a row may have other bits than alone.

    more: the row counts above eight that occur.
    """
    off: dict[str, list[set[int]]] = {}
    covered = {id(getattr(site, "covers", None)): site.rows for site in sites}
    for site in sites:
        if rows := inexact_rows(site, more) - covered.get(id(site), frozenset()):
            off.setdefault(site.op, []).append(rows)
    return tuple(
        f"{len(found)} layers' {op} at M={', '.join(map(str, sorted(set().union(*found))))}"
        for op, found in off.items()
    )


def others_not_exact(model: Any) -> Lines:
    """Return the names of a model's operations that have no exact kernel."""
    modules = [module for _, module in model.named_modules()]
    attentions = [m for m in modules if "o_proj" in m]
    selectable = model.runtime.adapters.names if hasattr(model, "runtime") else ()
    found = {
        FORMATS: any(type(m) in (*LINEARS, nn.QQLinear) or tied(model, m) for m in modules),
        "attention": any(not isinstance(m, VerifyAttention) and not getattr(m, "latent", None) for m in attentions),
        "the choice of sparse attention": any(isinstance(m, SparseMLA) for m in modules),
        "latent attention's products per head": any(type(m) in PER_HEAD for m in modules),
        "Mamba2's convolution": any(isinstance(m, Mamba2) for m in modules),
        "unquantized experts": any(type(m) is SwitchLinear for m in modules),  # sorted from 64 of them on
        "adapters": bool(selectable) or any("lora_a" in m for m in modules),
        "everything in mlx-lm's model without a kernel": isinstance(model, Made),
    }
    return tuple(name for name, present in found.items() if present)
