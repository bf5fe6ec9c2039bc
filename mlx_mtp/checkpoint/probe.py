"""Show on the loaded weights that a model of mlx-lm's, of a family without a port, can draft.

A few tokens are read into this package's caches as the decode loop reads them: at positions that the host counts, at
positions on the device, also while a function is recorded, with rows that are taken back, in a pool and as a tree.
The logits must equal those on mlx-lm's own caches.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache as mlx_lm_caches_of

from ..cache.branches import hidden_of_tree
from ..cache.kinds import group_size_for
from ..cache.make_cache import make_prompt_cache
from ..cache.pool import Pool
from ..cache.prompt_cache import PromptCache
from ..cache.slots import Span
from ..cache.step_cache import CacheArrays
from ..cache.tree import RowTree, along
from ..decoding.again import read_kept
from ..layers.made import Made, Plain
from ..layers.made_form import distance, take_form
from ..layers.noted import ModuleCall, noted, unnote
from ..layers.same_calls import ATTENTIONS
from ..machine.errors import first_line
from .head_self_test import random_tokens

PROMPT, KEPT, REJECTED, MORE = 6, 2, 2, 3  # rows of the passes before the last row; REJECTED are taken back
CHUNK = 4  # tokens of the prompt's first chunk
LEAST, MOST = 1e-3, 0.1  # limits of a difference relative to the greatest logit, in between NOISE times the usual one
NOISE = 4
OF_8_BITS = 0.3  # greatest difference of half of the rows with keys and values of 8 bits
FAILURES = (TypeError, AttributeError, LookupError, ArithmeticError, ValueError, RuntimeError, NotImplementedError)


def probe(model: Any) -> str | None:
    """Return why a model, loaded as `Plain`, cannot draft, else None; it is then a `Made` with its form.

    All weights are read.
    """
    model.become(Made)
    try:
        tokens = mx.array(random_tokens(model.vocab_size)[: PROMPT + KEPT + MORE + 1])[None]
        take_form(model, tokens)
        whole = model(tokens, cache=mlx_lm_caches_of(model))
        # mlx-lm's own rotating caches are wrong in pieces once they wrap, so noise is that of shorter texts.
        noise = distance(model(tokens[:, :PROMPT], cache=mlx_lm_caches_of(model)), whole[:, :PROMPT])
        limit = min(max(LEAST, NOISE * noise), MOST)
        if not noise <= MOST:
            raise ValueError("logits differ with the length of a prompt")
        _check_passes(model, tokens, whole, limit)
        model.runtime.alone = _tried(_check_pool, model, tokens, whole, limit)
        model.form.no_bits = _tried(_check_bits, model, tokens, whole)
        model.form.no_trees = _tried(_check_tree, model, tokens, whole, limit)
    except FAILURES as e:
        model.become(Plain)
        for module in model.modules():
            unnote(module)
        return first_line(e)
    return None


def _tried(check: Callable[..., None], *given: Any) -> str | None:
    """Return why a check fails; None if it passes."""
    try:
        check(*given)
    except FAILURES as e:
        return first_line(e)
    return None


def _check_passes(model: Any, tokens: mx.array, whole: mx.array, limit: float) -> None:
    """Raise ValueError if logits of a text, in passes on our caches, are not `whole`."""
    ends = [PROMPT, PROMPT + KEPT, PROMPT + KEPT + MORE]
    prompt, kept, more, last = mx.split(tokens, ends, axis=1)
    expected = mx.split(whole, ends, axis=1)
    attentions = [*{id(m): m for m in model.modules() if _is_attention(m)}.values()]
    cache, masks = make_prompt_cache(model), []
    for c in cache.layers:
        c.make_mask = partial(_checked_mask, masks, c.make_mask, c.window)
    with noted(attentions) as found:
        read = [_ours(model, chunk, cache) for chunk in mx.split(prompt, [CHUNK], axis=1)]
        _check("of a prompt in chunks", mx.concatenate(read, axis=1), expected[0], limit)
        _check("with rejected rows", _with_rejected(model, kept, cache), expected[1], limit)
    for c in cache.layers:
        del c.make_mask  # refers to the cache, which would keep its arrays until the garbage collection
    usual = (each for each in zip(attentions, found, strict=True) if _masked_by_caches(each[1], masks))
    model.form.attentions = [(module, calls[0].given[2].window) for module, calls in usual]
    _check("of recorded rows", _recorded(model, more, cache), expected[2], limit)
    _check("of one row", _ours(model, last, cache), expected[3], limit)


def _check(name: str, found: mx.array, expected: mx.array, limit: float) -> None:
    if not distance(found, expected) <= limit:  # NaN is no distance
        raise ValueError(f"logits differ in a pass {name}")


def _checked_mask(
    masks: list, make_mask: Callable[..., Any], window: Any, *given: Any, window_size: Any = None, **more: Any
):
    """Return a cache's mask, and append (window, mask) to `masks`.

    ValueError if the forward asks for another window than its `make_cache`.
    """
    if window_size not in (None, window):
        raise ValueError(f"its masks see {window_size} positions, its cache holds {window or 'all'}")
    masks.append((window, make_mask(*given, **more)))
    return masks[-1][1]


def _is_attention(module: Any) -> bool:
    linears = (module.get(name, ()) for name in ("q_proj", "k_proj", "v_proj"))
    return type(module) in ATTENTIONS and "q_norm" not in module and all("weight" in each for each in linears)


def _masked_by_caches(calls: Sequence[ModuleCall], masks: Sequence[tuple[Any, Any]]) -> bool:
    """Return whether an attention is called, and each time as (x, mask, cache) with a mask of such a cache's.

    masks: (window of the cache, mask) of each that a cache has made.
    """
    given = [call.given[1:] for call in calls]
    if not given or any(len(each) != 2 for each in given):
        return False
    return all(any(m is mask and getattr(c, "window", 0) == w for w, mask in masks) for m, c in given)


def _ours(model: Any, tokens: mx.array, cache: Any) -> mx.array:
    return model.logits(model.hidden(tokens, cache.layers))


def _with_rejected(model: Any, kept: mx.array, cache: PromptCache) -> mx.array:
    """Read rows to keep and REJECTED other ones, which are taken back; return the logits of the kept rows."""
    cache.to_device()
    rejected = (kept[:, :REJECTED] + 1) % model.vocab_size
    logits = _ours(model, mx.concatenate([kept, rejected], axis=1), cache)
    cache.rollback(mx.array([REJECTED]))
    read_kept(model, cache, [(PROMPT, kept[0].tolist())], KEPT + REJECTED)  # type: ignore[arg-type]
    cache.to_device()
    return logits[:, : kept.shape[1]]


def _recorded(model: Any, tokens: mx.array, cache: PromptCache) -> mx.array:
    """Return the logits of tokens; a function that reads them is also recorded: it must not evaluate a position."""
    form, arrays, end = cache.form(), cache.unload(), PROMPT + KEPT + MORE

    def read(tokens: mx.array, *arrays: Any) -> mx.array:
        made = form.made(model)
        made.load(CacheArrays(*arrays), end, end)
        return _ours(model, tokens, made)

    for c in cache.layers:
        c.hold(end)
    try:
        mx.compile(read)(tokens, *arrays)  # never computed: on a CPU MLX would run a compiler
    except ValueError as e:
        raise ValueError("its forward reads a position, or another array, on the host") from e
    return _ours(model, tokens, cache)


def _check_pool(model: Any, tokens: mx.array, whole: mx.array, limit: float) -> None:
    """Raise ValueError if the logits of a sequence differ in a pass with another one."""
    first, second = make_prompt_cache(model), make_prompt_cache(model)
    prompt, kept = tokens[:, :PROMPT], tokens[:, PROMPT : PROMPT + KEPT]
    for cache, ids in ((first, prompt), (second, prompt[:, :1])):
        _ours(model, ids, cache)
        cache.settle(ids[0].tolist())  # type: ignore[arg-type]
    pool = Pool(first)
    pool.regroup(Span([0, 1], 2), [0, 1], [(0, first), (1, second)])
    logits = _ours(model, mx.concatenate([kept, kept]), pool)[:1]
    _check("of two sequences", logits, whole[:, PROMPT : PROMPT + KEPT], limit)


def _check_tree(model: Any, tokens: mx.array, whole: mx.array, limit: float) -> None:
    """Raise ValueError if the logits of a tree's rows are not those of their paths, or of a row after a path."""
    cache, after = make_prompt_cache(model), tokens[0, PROMPT:]
    if model.runtime.alone:
        raise ValueError("no batches")
    if any(c.is_state for c in cache.layers):
        raise ValueError("layers whose states are mlx-lm's own")
    _ours(model, tokens[:, :PROMPT], cache)
    cache.to_device()
    rows = mx.stack([after[0], (after[1] + 1) % model.vocab_size, after[1], after[2], after[2]])[None]
    tree, path = RowTree.of(mx.array([[0, 0, 2, 1]]), levels=2), mx.array([[0, 2, 3]])
    logits = model.logits(hidden_of_tree(model, cache.layers, rows, tree))
    _check("of a tree", along(logits, path), whole[:, PROMPT : PROMPT + 3], limit)
    cache.keep_path(path)
    _check("after a tree", _ours(model, after[None, 3:4], cache), whole[:, PROMPT + 3 : PROMPT + 4], limit)


def _check_bits(model: Any, tokens: mx.array, whole: mx.array) -> None:
    """Set the form's `head_dim`; ValueError if the attention cannot read keys and values of 8 bits."""
    cache = make_prompt_cache(model)
    _ours(model, tokens, cache)
    sizes = [part.shape[-1] for c in cache.layers if not c.is_state for part in c.parts]
    if not sizes:
        raise ValueError("layers without keys and values")
    model.form.head_dim, model.form.no_bits = math.gcd(*sizes), None
    group_size = group_size_for(model)
    if model.form.head_dim % group_size:
        raise ValueError(f"heads of {min(sizes)}")
    cache = make_prompt_cache(model, kv_bits=8, kv_group_size=group_size)
    try:
        found = _ours(model, tokens, cache)
        near = [distance(found[:, i], whole[:, i]) <= OF_8_BITS for i in range(tokens.shape[1])]  # not with NaN
    except FAILURES as e:
        raise ValueError("attention that reads no quantized keys and values") from e
    if sum(near) < len(near) / 2:  # rounding may choose other experts in some rows
        raise ValueError("logits differ with keys and values of 8 bits")
