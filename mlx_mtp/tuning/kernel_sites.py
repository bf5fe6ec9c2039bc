"""Which modules of a loaded model a kernel takes the place of: swapped for ones that have a site, all of them off."""

import itertools
from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any

import mlx.nn as nn
from mlx_lm.models.mla import QuantizedMultiLinear

from ..cache.kinds import make_cache
from ..cache.recurrent import RecurrentCache
from ..cache.ring import Ring
from ..kernels import Rope, served
from ..layers.attention import Attention, Form, NormRope, VerifyAttention
from ..layers.eagle_head import EagleHead
from ..layers.experts import Mixture, VerifyMoE, servable
from ..layers.gated_delta import GatedDelta
from ..layers.lm_head import place_heads
from ..layers.mla import AbsorbedMLA, LatentAttention
from ..layers.mla_products import PerHead, VerifyMultiLinear
from ..layers.port import Port
from ..layers.products import (
    GLU,
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
from ..layers.residual_norm import Sum, VerifyBlock, VerifyNorm
from ..layers.site import Site
from ..layers.sparse_mla import SparseMLA

# Linears that, where a module has several of them, read the same x.
TOGETHER = (
    ("q_proj", "k_proj", "v_proj", "g_proj"),
    ("gate_proj", "up_proj"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("in_proj_qkvz", "in_proj_ba"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)
KV_BITS, KV_GROUPS = (8, 4), (64, 32)  # of quantized caches: the default group, else one that fits the head


def place(model: Port) -> list[Site]:
    """Swap the model's modules for ones that kernels can serve, all of them off: they are what they were."""
    modules = [module for _, module in model.named_modules()]  # type: ignore[attr-defined]
    sites: list[Site] = []
    for module, names in itertools.product(modules, TOGETHER):
        found = [child for name in names if type(child := module.get(name)) is nn.QuantizedLinear]
        for _, alike in itertools.groupby(found, key=_format):
            sites += _stacked(list(alike))
    for module in modules:
        sites += _swapped(model, module)
    return [
        *sites,
        *(Recurrence(module, RecurrentCache) for module in modules if isinstance(module, GatedDelta)),
        *_attentions(model),
        *(site for module in modules if isinstance(module, AbsorbedMLA) for site in _per_head(module)),
        *(_mixture(module) for module in modules if type(module) in model.MOE and servable(module)),
        *_sums(model),
        *place_heads(model),
    ]


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
        _become(module, VerifyMLP)
        return [module.glu]
    tie = tied(model, module)
    if kind is nn.QuantizedEmbedding and tie and _served(module):
        module.site, module.__class__ = Stack([module]), VerifyEmbedding
    elif kind is nn.Linear or (kind is nn.Embedding and tie):
        module.site, module.__class__ = Dense(module), VerifyDense if kind is nn.Linear else VerifyDenseEmbedding
    elif kind in model.ROUTER:
        module.site = Dense(module)
        _become(module, VerifyRouter)
    else:
        return []
    return [module.site]


def tied(model: Any, module: Any) -> bool:
    """Whether the module is an embedding that is the LM head, too, and no kernel's yet."""
    embedding = type(module) in (nn.Embedding, nn.QuantizedEmbedding)
    return embedding and module is model.model.embed_tokens and "lm_head" not in model.language


def _is_stacked(mlp: Any) -> bool:
    """Whether gate and up are one stack of their own, without biases."""
    gate, up = mlp.gate_proj, mlp.up_proj
    if not (type(gate) is type(up) is VerifyLinear):
        return False
    return gate.site is up.site and gate.site.modules == [gate, up] and "bias" not in gate and "bias" not in up


def _become(module: Any, mixin: type) -> None:
    module.__class__ = _mixed(mixin, type(module))


@cache
def _mixed(mixin: type, kind: type) -> type:
    """One class for all modules of a kind."""
    return type(kind.__name__, (mixin, kind), {})


def _attentions(model: Any) -> Iterator[Site]:
    """Of the layers, and of the heads' blocks, each with caches of its window."""
    pairs = zip(model.cached_layers(), model.windows(), strict=True)
    windowed = [(layer, window, model.NO_KV_BITS) for layer, window in pairs]
    windowed += [(head.block, head.window, getattr(head, "NO_KV_BITS", model.NO_KV_BITS)) for head in model.mtp]
    kinds = {*model.ATTENTION, *(head.attention for head in model.mtp if isinstance(head, EagleHead))}
    rings: dict[Any, Any] = {None: None}
    for layer, window, unquantized in windowed:
        if isinstance(window, type):
            continue
        if window not in rings:
            rings[window] = Ring(window)
        for _, module in layer.named_modules():
            if type(module) in kinds:
                yield from _attention(module, rings[window], () if unquantized else KV_BITS)
            elif isinstance(module, AbsorbedMLA) and not isinstance(module, SparseMLA):
                yield from _latent(module)


def _attention(module: Any, ring: Ring | None, kv_bits: Sequence[int]) -> Iterator[Site]:
    form = Form.of(module)
    rope = Rope.of(module.rope) if "rope" in module else None
    module.attention = Attention(module, form, partial(make_cache, ring))
    module.placing = None if rope is None else NormRope(module, form, rope)
    group_size = next((g for g in KV_GROUPS if form.head_dim % g == form.value_dim % g == 0), None)
    if group_size:
        formats = [{"bits": bits, "group_size": group_size} for bits in kv_bits]
        module.attention.quantized = [Attention(module, form, partial(make_cache, ring, **f)) for f in formats]
    _become(module, VerifyAttention)
    yield module.attention
    yield from module.attention.quantized
    if module.placing:
        yield module.placing


def _latent(module: Any) -> Iterator[Site]:
    module.latent, rope = LatentAttention(module), Rope.of(module.rope)
    yield module.latent
    if rope:
        width = module.qk_rope_head_dim
        module.placing = NormRope(module, Form(module.num_heads, 1, width, width, None, None), rope)
        yield module.placing


def _per_head(attention: Any) -> Iterator[Site]:
    """What latent attention reads has the heads first, and what reads its values has the rows first."""
    for module, heads_first in ((attention.embed_q, True), (attention.unembed_out, False)):
        if type(module) is QuantizedMultiLinear and _served(module):
            module.site, module.__class__ = PerHead(module, heads_first=heads_first), VerifyMultiLinear
            yield module.site


def _mixture(block: Any) -> Site:
    block.mixture = Mixture(block)
    _become(block, VerifyMoE)
    return block.mixture


def _sums(model: Any) -> Iterator[Site]:
    """In each layer and head's block, and between layers; before the final norm where the whole stream goes there."""
    layers = model.layers
    last = model.model.norm if isinstance(model.spec.capture, str) else None
    following = [*(layer.input_layernorm for layer in layers[1:]), last] if model.BLOCK else []
    blocks = [*zip(layers, following, strict=False), *((head.block, None) for head in model.mtp)]
    for block, after in blocks:
        if type(block) in model.BLOCK:
            norms = [norm for norm in (block.post_attention_layernorm, after) if norm is not None]
            if all(type(norm) in model.NORM for norm in norms):
                block.middle, block.after = [*(_sum(norm) for norm in norms), None][:2]
                _become(block, VerifyBlock)
                yield from (site for site in (block.middle, block.after) if site)


def _sum(norm: Any) -> Sum:
    norm.sum = Sum(norm)
    _become(norm, VerifyNorm)
    return norm.sum
