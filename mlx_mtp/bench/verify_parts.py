"""Build chains of calls on a model's own layers for each part of a verify, at any number of rows.

Widths, weights and caches are the model's. Inputs are random, except for experts, whose choice depends on them: they
get rows from the model itself.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import scaled_dot_product_attention

from ..cache.growing import round_up
from ..cache.kinds import make_cache
from ..cache.recurrent import RecurrentCache
from ..cache.ring import MAX_ROWS, Ring
from ..layers.attention import Attention
from ..layers.experts import PROJECTIONS
from ..layers.gated_delta import GatedDelta, Recurrence
from ..layers.mamba2 import Mamba2
from ..layers.mla import ABSORBED_ROWS, AbsorbedMLA, LatentAttention
from ..layers.norm_rope import AttentionForm
from ..layers.sparse_mla import SparseMLA
from ..tuning.kernel_sites import TOGETHER
from .timing import Call, TimedOp

LINEAR = (nn.Linear, nn.QuantizedLinear, nn.QQLinear)


@dataclass(frozen=True)
class VerifyPart:
    """One part of a verify, such as "projections" or "attention", to be timed.

    calls: returns the calls at a row count, about one per layer, with the kernels that are on. context: number of
    cached positions, None if it makes no difference. most: maximum number of rows.
    """

    name: str
    context: int | None
    calls: Callable[[int], list[Call]]
    most: int = MAX_ROWS


def parts_of(model: Any, contexts: Sequence[int], inputs: dict[int, mx.array]) -> Iterator[VerifyPart]:
    """Yield the parts that the model has; inputs: rows [1, MAX_ROWS, H] for its blocks with experts, by their ids."""
    dtype, modules = model.no_hidden().dtype, target_modules(model)
    blocks = [m for m in modules if _has_experts(m)]
    mixers: list[Any] = [m for m in modules if isinstance(m, Mamba2)]
    others = {id(model.unembedding()), *(id(m) for outer in (*blocks, *mixers) for _, m in outer.named_modules())}
    ops = [op for m in modules if id(m) not in others for op in products(m, others)]
    yield VerifyPart("projections", None, partial(_calls, ops, dtype))
    for context in contexts:
        yield from _attention(model, context, dtype)
    if blocks:
        yield VerifyPart("experts", None, lambda rows: [Call(_each([m]), inputs[id(m)][:, :rows]) for m in blocks])
    # After a tape that is partly accepted; Mamba2 with its projections, the gated delta rule without.
    rules = [Recurrence(m, RecurrentCache) for m in modules if isinstance(m, GatedDelta)]
    if rules:
        ops = [(partial(_either, rule, rule), rule.width) for rule in rules]
        yield VerifyPart("recurrent", None, partial(_calls, ops, dtype, flat=True))
    if mixers:
        tapes = [(m, _taped(m, dtype)) for m in mixers]
        ops = [(lambda x, m=m, tape=tape: [m(x, None, copy(tape))], width_of(m.in_proj)) for m, tape in tapes]
        yield VerifyPart("recurrent, projected", None, partial(_calls, ops, dtype))
    ops = [(partial(chosen, model), model.width)]
    yield VerifyPart("LM head", None, partial(_calls, ops, dtype))


def target_modules(model: Any) -> list[Any]:
    """Return all modules of a model except its MTP heads and its LM head or tied embedding, each once."""
    heads = {id(m) for head in model.mtp for _, m in head.named_modules()} | {id(model.unembedding())}
    found = {id(m): m for _, m in model.named_modules() if id(m) not in heads}
    return list(found.values())


def products(module: Any, others: Collection[int]) -> list[tuple[TimedOp, int]]:
    """Return a module's own linear layers except `others` (ids) as (op, width of x); those that share x are one op.

    A module with gate, up and down projections is one op.
    """
    names = {name for name, child in module.items() if isinstance(child, LINEAR) and id(child) not in others}
    if names.issuperset(PROJECTIONS):
        return [(_each([module]), width_of(module.gate_proj))]
    together = (*TOGETHER, *((name,) for name in sorted(names.difference(*TOGETHER))))
    groups = [[module[name] for name in group if name in names] for group in together]
    return [(_each(group), width_of(group[0])) for group in groups if group]


def width_of(linear: Any) -> int:
    """Return the number of inputs of a linear layer, quantized or not."""
    width = linear.weight.shape[-1]
    return width * 32 // linear.bits if "scales" in linear else width


def _each(modules: list[Any]) -> TimedOp:
    return lambda x: [module(x) for module in modules]


def _calls(ops: Sequence[tuple[TimedOp, int]], dtype: mx.Dtype, rows: int, *, flat: bool = False) -> list[Call]:
    """Return calls of ops on random rows of their widths: [1, M, width], or [M, width] if flat."""
    drawn = [(op, _random(rows, width, dtype)) for op, width in ops]
    return [Call(op, x[0] if flat else x) for op, x in drawn]


def _random(rows: int, width: int, dtype: mx.Dtype) -> mx.array:
    return mx.random.normal((1, rows, width), dtype, key=mx.random.key(width))


def chosen(model: Any, hidden: mx.array) -> list[mx.array]:
    """Return the greedy tokens of hidden rows [1, M, H], chosen as in the loop."""
    rows = model.choice(hidden)
    return [mx.argmax(model.logits(hidden), axis=-1) if rows is None else rows.greedy()]


def _attention(model: Any, context: int, dtype: mx.Dtype) -> Iterator[VerifyPart]:
    """Yield attention after its projections, including its writes to the cache."""
    plain: list[Attention] = []
    latent: list[Any] = []
    rings = {window: Ring(window) for window in model.windows() if isinstance(window, int)}
    for layer, window in zip(model.cached_layers(), model.windows(), strict=True):
        for _, module in layer.named_modules():
            base = type(module).__mro__
            if any(kind in model.ATTENTION for kind in base):
                plain.append(
                    Attention(module, AttentionForm.of(module), partial(make_cache, rings.get(window, window)))
                )
            elif isinstance(module, AbsorbedMLA) and not isinstance(module, SparseMLA):
                latent.append(LatentAttention(module))
    if plain:
        filled = [(site, _filled(site, context, dtype)) for site in plain]
        yield VerifyPart("attention", context, partial(_attention_calls, filled, context, dtype))
    if latent:
        for site in latent:
            site.OFFSET, site.SLOTS = context, round_up(context + MAX_ROWS)
        ops = [(partial(_either, site, site.module.latent), site.width) for site in latent]
        yield VerifyPart("attention", context, partial(_calls, ops, dtype, flat=True), most=ABSORBED_ROWS)


def _filled(site: Attention, context: int, dtype: mx.Dtype) -> Any:
    """Return a cache with random keys and values of `context` positions, as far as its window holds them."""
    cache = site.make_cache()
    slots = cache.ring.slots if cache.window else round_up(context + MAX_ROWS)
    shapes = [(1, site.form.kv_heads, slots, d) for d in (site.form.head_dim, site.form.value_dim)]
    cache.parts = tuple(mx.random.normal(shape, dtype, key=mx.random.key(shape[-1])) for shape in shapes)
    mx.eval(cache.parts)
    return cache


def _attention_calls(filled: list[tuple[Attention, Any]], context: int, dtype: mx.Dtype, rows: int) -> list[Call]:
    at = mx.array([context]) if rows > 1 else context
    masks: dict[Any, Any] = {}
    for _, cache in filled:
        cache.seek(at, context)
        masks.setdefault(cache.window, cache.make_mask(rows))
    mx.eval(masks)
    ops = [(partial(_attended, site, c, at, context, masks[c.window]), site.width) for site, c in filled]
    return _calls(ops, dtype, rows)


def _attended(
    site: Attention, cache: Any, at: int | mx.array, context: int, mask: Any, x: mx.array
) -> list[mx.array]:
    """Write M rows, made from x, at position `at`; return [attention output of queries x [1, M, Hq * D]].

    at: one position, or an array [1] of it. context: upper bound of `at`, on the host. mask: the cache's for M rows.
    """
    form, rows, placed = site.form, x.shape[1], getattr(site.module, "attention", None)
    q = x.reshape(1, rows, form.heads, -1).swapaxes(1, 2)
    k = q[:, : form.kv_heads]
    v = mx.tile(k, (1, 1, 1, -(-form.value_dim // form.head_dim)))[..., : form.value_dim]
    cache.seek(at, context)
    views = cache.update_and_fetch(k, v)
    if placed is not None and rows in placed.rows:
        return [site.fused(q, cache, at, None)]
    how = {"cache": cache, "scale": site.module.scale, "mask": mask, "sinks": site.sinks}
    return [scaled_dot_product_attention(q, *views, **how)]


def _either(site: Any, placed: Any, x: mx.array) -> list[mx.array]:
    """Return the outputs of a site's kernel on rows x if `placed` is on for this row count, else of mlx-lm's ops."""
    return site.ours(x) if placed is not None and len(x) in placed.rows else site.stock(x)


def _taped(mixer: Any, dtype: mx.Dtype) -> RecurrentCache:
    """Return a mixer's cache after 4 rows of a prompt and a verify of 4 rows, of which 2 are accepted."""
    cache, rows = RecurrentCache(), _random(8, width_of(mixer.in_proj), dtype)
    mixer(rows[:, :4], None, cache)
    cache.seek(mx.array([4]), 4)
    mixer(rows[:, 4:], None, cache)
    cache.seek(mx.array([6]), 8)
    mx.eval(cache.parts)
    return cache


class Noted(nn.Module):
    """Wraps a module with experts; each call stores its input in `inputs` by the module's id."""

    def __init__(self, inner: Any, inputs: dict[int, mx.array]):
        super().__init__()
        self.inner, self._inputs = inner, inputs

    def __call__(self, x: mx.array) -> Any:
        self._inputs[id(self.inner)] = x
        return self.inner(x)


@contextmanager
def expert_inputs(model: Any) -> Iterator[dict[int, mx.array]]:
    """Yield a dict in which calls of modules with experts, inside the block, store their last input by module id."""
    inputs: dict[int, mx.array] = {}
    places = [(m, name) for m in target_modules(model) for name, child in m.items() if _has_experts(child)]
    for module, name in places:
        module[name] = Noted(module[name], inputs)
    try:
        yield inputs
    finally:
        for module, name in places:
            module[name] = module[name].inner


def _has_experts(child: Any) -> bool:
    return isinstance(child, nn.Module) and "switch_mlp" in child
