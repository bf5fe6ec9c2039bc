"""The kernels that a loaded model runs with: modules swapped, tried, and switched on."""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import SwitchLinear

from .kernels import on_metal, served
from .layers.gated_delta import GatedDelta
from .layers.mamba2 import Mamba2
from .layers.port import Port
from .layers.verify import (
    GLU,
    VERIFY_ROWS,
    Dense,
    Recurrence,
    Stack,
    VerifyDense,
    VerifyDenseEmbedding,
    VerifyEmbedding,
    VerifyLinear,
    VerifyMLP,
    VerifyRouter,
)
from .recurrent_cache import RecurrentCache
from .trial import Memory, Trial, Verdict, decide, in_words

# Linears that, where a module has several of them, read the same x.
TOGETHER = (
    ("q_proj", "k_proj", "v_proj", "g_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
PER_HEAD = (MultiLinear, QuantizedMultiLinear)
UNSERVED = (nn.QuantizedLinear, nn.QQLinear)
FORMATS = "products in a format without a kernel"
Site = Stack | GLU | Dense | Recurrence
Lines = tuple[str, ...]


def switch_on(model: Any, lane: str | None, *, lazy: bool = False) -> tuple[Lines, Lines]:
    """Switch on the model's kernels; the report's lines, and the ops whose bits may depend on the number of rows.

    lane: None decides by trial, "exact" and "fast" take what is right, "off" takes none. Without a Metal GPU, or for
    a model that verifies nothing, all stays as it is; by trial also with `lazy` weights, which a trial would read.
    """
    if not on_metal():
        return ("none: no Metal GPU",), ()
    if not isinstance(model, Port):
        return ("none: decoded one row at a time",), ()
    if lane == "off" or (lane is None and lazy):
        why = "asked for" if lane else "a trial would read all of the lazy weights"
        return (f"none: {why}",), ("all products", *(line for line in others_not_exact(model) if line != FORMATS))
    sites = place(model)
    dtype = model.no_hidden().dtype
    tried = trials(sites, dtype)
    verdicts = decide(tried, lane=lane, memory=Memory(_fingerprint(tried)))
    switch(sites, verdicts, dtype)
    return in_words(verdicts), (*rows_not_exact(sites), *others_not_exact(model))


def _fingerprint(tried: Iterable[Trial]) -> str:
    shapes = sorted(f"{len(trial.pairs)} {trial.key}" for trial in tried)
    return hashlib.sha256("\n".join(shapes).encode()).hexdigest()


def place(model: Port) -> list[Site]:
    """Swap the model's products for ones that a kernel can serve, all of them off: they are what they were."""
    modules = [module for _, module in model.named_modules()]  # type: ignore[attr-defined]
    sites: list[Site] = []
    for module, names in itertools.product(modules, TOGETHER):
        found = [child for name in names if type(child := module.get(name)) is nn.QuantizedLinear]
        for _, alike in itertools.groupby(found, key=_format):
            sites += _stacked(list(alike))
    for module in modules:
        sites += _swapped(model, module)
    return sites + [Recurrence(module, RecurrentCache) for module in modules if isinstance(module, GatedDelta)]


def _format(linear: Any) -> tuple:
    return linear.mode, linear.bits, linear.group_size, linear.scales.shape[1], linear.scales.dtype


def _served(module: Any) -> bool:
    return served(module.mode, module.bits, module.group_size) and module.get("global_scale") is None


def _stacked(linears: Sequence[Any]) -> list[Site]:
    if not _served(linears[0]):
        return []
    stack = Stack(linears)
    for index, linear in enumerate(linears):
        linear.__class__, linear.site, linear.index = VerifyLinear, stack, index
    return [stack]


def _swapped(model: Port, module: Any) -> list[Site]:
    """The site of a single module, if it is of a kind that has one."""
    kind = type(module)
    if kind is nn.QuantizedLinear:
        return _stacked([module])
    if kind in model.MLP and _is_stacked(module):
        module.glu = GLU(module)
        module.__class__ = type(kind.__name__, (VerifyMLP, kind), {})
        return [module.glu]
    tied = _tied(model, module)
    if kind is nn.QuantizedEmbedding and tied and _served(module):
        module.site, module.__class__ = Stack([module]), VerifyEmbedding
    elif kind is nn.Linear or (kind is nn.Embedding and tied):
        module.site, module.__class__ = Dense(module), VerifyDense if kind is nn.Linear else VerifyDenseEmbedding
    elif kind in model.ROUTER:
        module.site, module.__class__ = Dense(module), type(kind.__name__, (VerifyRouter, kind), {})
    else:
        return []
    return [module.site]


def _tied(model: Any, module: Any) -> bool:
    """Whether the module is an embedding that is the LM head, too, and no kernel's yet."""
    embedding = type(module) in (nn.Embedding, nn.QuantizedEmbedding)
    return embedding and module is model.model.embed_tokens and "lm_head" not in model.language


def _is_stacked(mlp: Any) -> bool:
    """Whether gate and up are one stack of their own, without biases."""
    gate, up = mlp.gate_proj, mlp.up_proj
    if not (type(gate) is type(up) is VerifyLinear):
        return False
    return gate.site is up.site and gate.site.modules == [gate, up] and "bias" not in gate and "bias" not in up


def trials(sites: Iterable[Site], dtype: mx.Dtype) -> list[Trial]:
    """One per op, shape and number of rows, over all sites of that shape, for x of `dtype`; the fewest rows first."""
    alike: dict[tuple[str, str], list[Site]] = {}
    for site in sites:
        alike.setdefault((site.op, f"{site.shape} {str(dtype).rpartition('.')[2]}"), []).append(site)
    found = [
        Trial(op, shape, rows, [(s.ours, s.stock) for s in of_shape], of_shape[0].width, dtype, _alone(of_shape))
        for (op, shape), of_shape in alike.items()
        for rows in of_shape[0].candidates
    ]
    return sorted(found, key=lambda trial: trial.rows)


def _alone(sites: Sequence[Site]) -> list[Callable] | None:
    return [site.alone for site in sites if isinstance(site, Recurrence)] or None


def switch(sites: Iterable[Site], verdicts: Mapping[tuple[str, str, int], Verdict], dtype: mx.Dtype) -> None:
    """Let each site serve the row counts that its verdicts allow."""
    for site in sites:
        site.rows = frozenset(trial.rows for trial in trials([site], dtype) if verdicts[trial.key].on)
    mx.clear_cache()  # of what the trials made


def rows_not_exact(sites: Sequence[Site]) -> Lines:
    """What stock MLX still computes for some rows of a verify, one line per op."""
    off: dict[str, list[set[int]]] = {}
    whole = {id(site.stack): site.rows for site in sites if isinstance(site, GLU)}
    for site in sites:
        rows = set(VERIFY_ROWS) - site.rows - whole.get(id(site), frozenset())
        if rows and not isinstance(site, GLU):
            off.setdefault(site.op, []).append(rows)
    return tuple(
        f"{len(found)} layers' {op} at M={', '.join(map(str, sorted(set().union(*found))))}"
        for op, found in off.items()
    )


def others_not_exact(model: Any) -> Lines:
    """What has no exact kernel."""
    modules = [module for _, module in model.named_modules()]
    found = {
        FORMATS: any(type(m) in UNSERVED or _tied(model, m) for m in modules),
        "attention": any(window != "recurrent" for window in model.windows()),
        "latent attention's products per head": any(isinstance(m, PER_HEAD) for m in modules),
        "Mamba2's convolution": any(isinstance(m, Mamba2) for m in modules),
        "unquantized experts": any(type(m) is SwitchLinear for m in modules),  # sorted from 64 of them on
        "adapters": any("lora_a" in m for m in modules),
    }
    return tuple(name for name, present in found.items() if present)
