"""Add sites to a loaded model: places where a kernel may run instead of a module once it is switched on."""

import itertools
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import mlx.nn as nn
from mlx_lm.models.mla import QuantizedMultiLinear

from ..cache.kinds import make_cache
from ..cache.recurrent import RecurrentCache
from ..cache.ring import Ring
from ..kernels import RopeArguments
from ..layers.attention import Attention, VerifyAttention
from ..layers.blocks import BlockEmbedding, BlockLinear, BlockMultiLinear, is_blocks
from ..layers.experts import Mixture, VerifyMoE, servable
from ..layers.gated_delta import GatedDelta, Recurrence
from ..layers.kernel_site import Site, known_format
from ..layers.lm_head import place_heads
from ..layers.made import Made
from ..layers.mamba2 import Mamba2, Scan
from ..layers.mla import AbsorbedMLA, LatentAttention, OwnPerHead, PerHead, VerifyMultiLinear
from ..layers.mtp_head import EagleHead
from ..layers.norm_rope import AttentionForm, NormRope
from ..layers.products import (
    GLU,
    Dense,
    OwnGLU,
    OwnStack,
    Stack,
    VerifyEmbedding,
    VerifyLinear,
    VerifyMLP,
    VerifyRouter,
)
from ..layers.residual_norm import Sum, VerifyBlock, VerifyNorm
from ..layers.scaled import SCALE, ScaledLinear
from ..layers.sparse_mla import ChosenAttention, SparseMLA

# Names of linears of a module that read the same x; one kernel can compute them together.
TOGETHER = (
    ("q_proj", "k_proj", "v_proj", "g_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
LINEARS = nn.QuantizedLinear, ScaledLinear, BlockLinear
EMBEDDINGS = nn.QuantizedEmbedding, BlockEmbedding
KV_BITS, KV_GROUPS = (8, 4), (64, 32)  # of quantized caches; the first group size that divides the head sizes is used
T = TypeVar("T")


def place(model: Any) -> list[Site]:
    """Add sites to a port's modules and to its `runtime.sites`, and return them; all kernels are off at first."""
    modules = [module for _, module in model.named_modules()]
    sites: list[Site] = []
    for module, names in itertools.product(modules, TOGETHER):
        found = [child for name in names if type(child := module.get(name)) in LINEARS]
        for _, alike in itertools.groupby(found, key=_format):
            sites += _stack(list(alike))
    for module in modules:
        sites += _single(model, module)
    mixtures = (module for module in modules if type(module) in model.MOE and servable(module))
    sites += [
        *(Recurrence(module, RecurrentCache) for module in modules if isinstance(module, GatedDelta)),
        *(Scan(module, RecurrentCache) for module in modules if isinstance(module, Mamba2)),
        *_attentions(model),
        *(site for module in modules if isinstance(module, AbsorbedMLA) for site in _per_head(module)),
        *(_swap(block, "mixture", Mixture(block), VerifyMoE) for block in mixtures),
        *_sums(model),
        *place_heads(model),
    ]
    model.runtime.sites += sites
    return sites


def _format(linear: Any) -> tuple:
    form = linear.mode, linear.bits, linear.group_size, linear.scales.shape[1], linear.scales.dtype
    return *form, SCALE in linear


def _stack(linears: Sequence[Any]) -> list[Site]:
    """Add one site to linears that read the same x; return it in a list, [] if no kernel supports their format."""
    if not known_format(linears[0], scaled=True):
        return []
    stack = (OwnStack if is_blocks(linears[0]) else Stack)(linears)
    for index, linear in enumerate(linears):
        linear.index = index
        _swap(linear, "site", stack, VerifyLinear)
    return [stack]


def _single(model: Any, module: Any) -> list[Site]:
    """Add the site of a module whose kernel serves this module alone; return it in a list, [] if there is none."""
    kind, tie = type(module), tied(model, module)
    if kind in LINEARS:
        return _stack([module])
    if kind in model.MLP and _is_stacked(module):
        return [_swap(module, "glu", (OwnGLU if is_blocks(module.gate_proj) else GLU)(module), VerifyMLP)]
    if kind in EMBEDDINGS and tie and known_format(module):
        return [_swap(module, "site", (OwnStack if is_blocks(module) else Stack)([module]), VerifyEmbedding)]
    if kind in model.ROUTER:
        return [_swap(module, "site", Dense(module), VerifyRouter)]
    dense = {nn.Linear: VerifyLinear, **({nn.Embedding: VerifyEmbedding} if tie else {})}
    return [_swap(module, "site", Dense(module), dense[kind])] if kind in dense else []


def tied(model: Any, module: Any) -> bool:
    """Return whether a module is an embedding that is also the LM head, and has no site yet."""
    return type(module) in (nn.Embedding, *EMBEDDINGS) and module is model.unembedding()


def _is_stacked(mlp: Any) -> bool:
    """Return whether an MLP's gate and up projections share one site and have no biases and no output scales."""
    both = [mlp.gate_proj, mlp.up_proj]
    stack = getattr(mlp.gate_proj, "site", None)
    return isinstance(stack, Stack) and stack.modules == both and not any({"bias", SCALE} & {*m} for m in both)


def _swap(module: Any, name: str, site: T, mixin: type) -> T:
    """Set a module's site under a name, and prepend to its class a mixin that calls the site; return the site."""
    setattr(module, name, site)
    module.__class__ = _mixed(mixin, type(module))
    return site


@cache
def _mixed(mixin: type, kind: type) -> type:
    """Return the class that combines a mixin with a module's class."""
    return type(kind.__name__, (mixin, kind), {})


def _attentions(model: Any) -> Iterator[Site]:
    """Add sites to the attentions in layers and MTP heads, one at a time, and yield each.

    Their trials use caches of the layer's window.
    """
    made = isinstance(model, Made)
    pairs = model.form.attentions if made else zip(model.cached_layers(), model.windows(), strict=True)
    windowed = [(layer, window, model.NO_KV_BITS) for layer, window in pairs]
    windowed += [(head.block, head.window, getattr(head, "NO_KV_BITS", model.NO_KV_BITS)) for head in model.mtp]
    kinds = {*model.ATTENTION, *(head.attention for head in model.mtp if isinstance(head, EagleHead))}
    rings: dict[Any, Ring] = {window: Ring(window) for _, window, _ in windowed if isinstance(window, int)}
    for layer, window, unquantized in windowed:
        for _, module in () if isinstance(window, type) else layer.named_modules():  # a class: no attention
            if type(module) in kinds:
                yield from _attention(module, rings.get(window), () if unquantized else KV_BITS)
            elif isinstance(module, AbsorbedMLA):
                yield from _latent(module, model.args.index_topk if isinstance(module, SparseMLA) else None)


def _attention(module: Any, ring: Ring | None, kv_bits: Sequence[int]) -> Iterator[Site]:
    form = AttentionForm.of(module)
    rope = RopeArguments.of(module.rope) if "rope" in module else None
    group_sizes = [g for g in KV_GROUPS if form.head_dim % g == form.value_dim % g == 0][:1]
    formats = [{}, *({"bits": bits, "group_size": g} for g in group_sizes for bits in kv_bits)]
    plain, *quantized = (Attention(module, form, partial(make_cache, ring, **f)) for f in formats)
    plain.quantized = quantized
    _swap(module, "attention", plain, VerifyAttention)
    module.placing = None if rope is None else NormRope(module, form, rope)
    yield from (plain, *quantized)
    if module.placing:
        yield module.placing


def _latent(module: Any, chosen: int | None = None) -> Iterator[Site]:
    """Add the sites of a latent attention to its module, one at a time, and yield each.

    chosen: number of positions that each row of a sparse attention attends to; None for a dense attention.
    """
    module.latent = LatentAttention(module) if chosen is None else ChosenAttention(module, chosen)
    yield module.latent
    if rope := RopeArguments.of(module.rope):
        width = module.qk_rope_head_dim
        module.placing = NormRope(module, AttentionForm(module.num_heads, 1, width, width, None, None), rope)
        yield module.placing


def _per_head(attention: Any) -> Iterator[Site]:
    """Add sites to the quantized per-head products of an attention, one at a time, and yield each.

    In memory, the outputs for queries have the head axis first, those for values the row axis.
    """
    for module, heads_first in ((attention.embed_q, True), (attention.unembed_out, False)):
        if type(module) in (QuantizedMultiLinear, BlockMultiLinear) and known_format(module):
            site = (OwnPerHead if is_blocks(module) else PerHead)(module, heads_first=heads_first)
            yield _swap(module, "site", site, VerifyMultiLinear)


def _sums(model: Any) -> Iterator[Site]:
    """Add sites to the residual sums with the norms after them, in layers and MTP heads, and yield each.

    A layer's second sum is followed by the next layer's norm, or the final one. Other blocks or norms than those of
    `model.BLOCK` and `model.NORM` have no sites.
    """
    layers = model.layers if model.BLOCK else []
    last = model.final_norm if isinstance(model.spec.capture, str) else None
    following = [*(layer.input_layernorm for layer in layers[1:]), last]
    blocks = [*zip(layers, following, strict=False), *((head.block, None) for head in model.mtp)]
    for block, after in blocks:
        if type(block) in model.BLOCK:
            norms = [norm for norm in (block.post_attention_layernorm, after) if norm is not None]
            if all(type(norm) in model.NORM for norm in norms):
                sums = [_swap(norm, "sum", Sum(norm), VerifyNorm) for norm in norms]
                block.after = sums[1] if len(sums) > 1 else None
                _swap(block, "middle", sums[0], VerifyBlock)
                yield from sums
