"""Estimate the memory that a model needs at a context, and the context that fits, before weights are read."""

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..cache.absorb import most_unread
from ..cache.branches import COPIES, copied_bytes
from ..cache.make_cache import make_prompt_cache
from ..cache.prompt_cache import PromptCache
from ..cache.ring import MAX_ROWS
from ..layers.target import Target
from ..machine import memory
from ..machine.memory import IGNORE, check_room, ignored, in_gb
from .graph_memory import fill, nbytes, plain_nbytes, scratch

CHUNK = 2048  # default tokens per prefill chunk
LOOPED = (16, 32)  # two numbers of rows from which a layer that loops over rows is extrapolated; fewer rows mislead
VERIFIED = 4  # rows of a cycle; a recurrent layer keeps a tape of them
SLACK = 1.4  # factor of the scratch estimated from a graph: measured 0.7 to 1.3
RESERVED_TOKENS = 4096  # maximum new tokens that a cache reserves in advance
UNCHECKED = 4096  # positions that a load leaves memory for, so that a generation need not check
LONGEST = 2**22  # positions; maximum of a search for a context
GRAIN = 256  # positions by which buffers grow and contexts are searched
FEWEST = 16  # minimum rows per chunk when a longer context is estimated
NARROW = 256  # minimum width in `_upper_bound`: narrower models have more heads per column
STATED = "max_position_embeddings"  # in config.json
SMALLER = (8, 4)  # kv_bits that a refusal suggests


@dataclass(frozen=True)
class Needs:
    """Bytes at one context: weights of the target and of the drafter, caches of both, temporary arrays of a pass.

    heads, head_kv: weights and caches of the MTP heads and any other drafter. vision: weights of the vision tower,
    which are read when the first picture is encoded; 0 without a tower, and in the check before a load.
    """

    weights: int
    heads: int
    kv: int = 0
    head_kv: int = 0
    scratch: int = 0
    vision: int = 0

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def __str__(self) -> str:
        parts = [f"{name.replace('_', ' ')} {in_gb(size)}" for name, size in vars(self).items() if size]
        return f"{in_gb(self.total)} GB ({', '.join(parts)})"


@dataclass(frozen=True)
class Budget:
    """The context that a load must leave memory for.

    context: positions; 0 checks the weights alone.
    step:    tokens per prefill chunk.
    layout:  arguments of `make_prompt_cache`.
    ignore:  skip the check.
    """

    context: int = 0
    step: int = CHUNK
    layout: Mapping[str, Any] = field(default_factory=dict)
    ignore: bool = False

    def check(self, model: Target, path: Path) -> None:
        """Raise ValueError, with what would fit, if `model`, loaded lazily from `path`, needs too much memory.

        Nothing is checked with `ignore` or the environment variable IGNORE; a layout that the model does not support
        raises ValueError in any case.
        """
        have, cache = memory.available(), make_prompt_cache(model, **self.layout)
        weights = nbytes(model.parameters())
        bound = weights + _upper_bound(model, cache, self.context, min(self.step, self.context))
        if bound <= have.bytes or self.ignore or ignored():
            return
        found = replace(needs(model, self.context, chunk=self.step, **self.layout), vision=0)  # not read by a load
        if found.total <= have.bytes:
            return
        asked = f" with max_context={self.context}" if self.context else ""
        what = ", or ".join(_fitting(model, have.bytes, self)) or "no context fits"
        limit = f"{in_gb(have.bytes)} GB available ({have.limit})"
        raise ValueError(f"{path}: {found} needed{asked}, {limit}; {what}; {IGNORE}=1 skips this check")


def needs(model: Target, context: int, *, chunk: int = CHUNK, **layout: Any) -> Needs:
    """Estimate the memory of `model` with caches at `context` positions and prefill chunks of `chunk` tokens.

    model: also lazy or without weights. context: 0 for the weights alone. layout: arguments of `make_prompt_cache`,
    whose ValueError is raised.
    """
    cache, heads = make_prompt_cache(model, **layout), nbytes([model.get("mtp", []), model.get("drafter", {})])
    sizes = _caches_and_scratch(model, cache, context, min(chunk, context)) if context else ()
    return Needs(nbytes(model.parameters()) - heads, heads, *sizes, vision=_tower_bytes(model))


def _tower_bytes(model: Target) -> int:
    """Return the bytes of the model's vision tower; 0 without one."""
    return model.vision.nbytes if model.vision is not None else 0


def _caches_and_scratch(model: Target, cache: PromptCache, context: int, rows: int) -> tuple[int, int, int]:
    """Estimate the bytes of the target's caches, of the heads' caches, and of temporary arrays.

    The caches are at `context` positions; the arrays are those of prefilling the last `rows` of these.
    """
    full, kv, head_kv = _filled(model, cache, context)
    # A CPU runs a recurrence row by row: its graph is too large for many rows.
    if any(c.is_state for c in full.layers) and mx.default_device() == mx.cpu and rows > LOOPED[-1]:
        small, large = (scratch(model, full, context, n) for n in LOOPED)
        held = small + (large - small) * (rows - LOOPED[0]) // (LOOPED[1] - LOOPED[0])
    else:
        held = scratch(model, full, context, rows)
    return kv, head_kv, max(int(SLACK * held), _branches(model, full)) + _logits(model)


def _branches(model: Target, full: PromptCache) -> int:
    """Return the bytes that verifying a draft tree copies of caches, which are those of `full`; 0 without drafts."""
    return copied_bytes(full.layers) if model.max_draft_tokens and not full.is_mlx_lm else 0


def _upper_bound(model: Target, cache: PromptCache, context: int, rows: int) -> int:
    """Return an upper bound of the sum of `_caches_and_scratch` that needs no graph.

    The bound assumes an attention head per 8 columns, and keys as wide as the model; copies for a tree's rows are of
    two layers.
    """
    width, layers = max(NARROW, model.no_hidden().shape[-1]), len(model.layers) + len(model.mtp)
    positions = context + 2 * GRAIN + max((c.window or 0 for c in cache.caches), default=0)
    copies = 2 * COPIES if model.max_draft_tokens else 0
    held = 4 * width * (rows * (positions // 8 + 256) + 2 * layers * positions)
    return held + min(copies, 16 * width * MAX_ROWS * positions) + _logits(model)


def kv_bytes(model: Target, cache: PromptCache, context: int) -> tuple[int, int]:
    """Return the bytes of the target's and the heads' caches at `context` positions in the layout of `cache`.

    The target's at least those before its caches are quantized; the heads' at least their pending rows in a pause.
    """
    return _filled(model, cache, context)[1:]


def _filled(model: Target, cache: PromptCache, context: int) -> tuple[PromptCache, int, int]:
    """Return a cache of the same layout at `context` positions, and the bytes of its target's and heads' caches."""
    full = cache.like_new()
    full.quantize_at(context - 1)
    hidden = fill(model, full, context, VERIFIED)
    if full.is_mlx_lm:
        return full, plain_nbytes(full.layers[0], context), 0
    kv, head_kv = (sum(c.nbytes for c in caches) for caches in (full.layers, full.heads))
    if cache.quantizing and not full.quantizing:
        before = cache.like_new()
        fill(model, before, max(1, cache.quantizing.start), 1)
        kv = max(kv, sum(c.nbytes for c in before.layers))
    # Paused heads have pending hidden rows instead of keys and values.
    pending = hidden * min(context, most_unread(cache) or context) if cache.heads else 0
    return full, kv, max(head_kv, pending)


def _logits(model: Target) -> int:
    """Return the bytes of a cycle's logits, logprobs, masks and sorted orders."""
    rows = MAX_ROWS if model.max_draft_tokens else 1
    return rows * model.vocab_size * 4 * 4


def stated_positions(model: Any) -> int | None:
    """Return the maximum positions in a model's config.json, there or in its text_config; None if it states none."""
    text = getattr(model.args, "text_config", None)
    return getattr(model.args, STATED, None) or (text.get(STATED) if isinstance(text, dict) else None) or None


def largest_context(model: Target, budget: int, *, chunk: int = CHUNK, longest: int = LONGEST, **layout: Any) -> int:
    """Return a number of positions, about the largest, whose `needs` fit in `budget` bytes; 0 if none does.

    `needs` includes all weights, also the vision tower's. The result is `longest` if that fits, else a multiple of
    GRAIN below it. chunk: tokens per prefill chunk. layout: arguments of `make_prompt_cache`.
    """
    room = budget - nbytes(model.parameters()) - _tower_bytes(model)
    return _largest(model, make_prompt_cache(model, **layout), room, chunk, longest)


def _largest(model: Target, cache: PromptCache, room: int, chunk: int, longest: int = LONGEST) -> int:
    """Return about the largest number of positions whose caches and temporary arrays fit in `room` bytes, or 0.

    cache: an empty one of the layout. chunk: tokens per prefill chunk. longest: the maximum of the result.
    """
    if sum(_caches_and_scratch(model, cache, longest, min(chunk, longest))) <= room:
        return longest
    near, far = (_caches_and_scratch(model, cache, n * chunk, chunk)[2] for n in (2, 66))

    def total(context: int) -> int:
        beyond = context - 2 * chunk  # from there on scratch grows with the position
        held = near + beyond * (far - near) // (64 * chunk) if beyond > 0 else near * context // (2 * chunk)
        return sum(kv_bytes(model, cache, context)) + held

    context = GRAIN * bisect.bisect_right(range(GRAIN, longest, GRAIN), room, key=total)
    while context and sum(_caches_and_scratch(model, cache, context, min(chunk, context))) > room:
        context = context * 15 // 16 // GRAIN * GRAIN  # scratch does not grow evenly
    return context


def _fitting(model: Target, budget: int, asked: Budget) -> Iterator[str]:
    """Yield in words what would fit: the largest context, and a longer one with 8 and with 4 kv_bits.

    The longer ones are at most the requested context. Nothing if no context fits. budget: bytes for weights, caches
    and temporary arrays. asked: the load's Budget.
    """
    plain = largest_context(model, budget, chunk=asked.step, **asked.layout)
    if plain:
        yield f"max_context={plain} fits"
    if asked.layout.get("kv_bits") is not None or model.NO_KV_BITS is not None:
        return
    for bits in SMALLER:
        found = largest_context(model, budget, chunk=asked.step, **{**asked.layout, "kv_bits": bits})
        context = min(asked.context, found)
        if context > 1.1 * plain:
            yield f"{context} with kv_bits={bits}"


def within(max_context: int | None, held: int, prompt: int, max_tokens: int) -> int:
    """Return the maximum number of new tokens: max_tokens, or for -1 (no limit) what `max_context` leaves.

    held, prompt: tokens in the cache and of the prompt. Without max_context, max_tokens is returned, also -1. Raises
    ValueError if max_context is below 1, or below the sum of all three (-1 counts as one token).
    """
    if max_context is None:
        return max_tokens
    if max_context < 1:
        raise ValueError(f"max_context={max_context}: allowed is 1 or more")
    left = max_context - held - prompt
    if left < (1 if max_tokens == -1 else max_tokens):
        already = f" after {held} in the cache" if held else ""
        new = "a new one" if max_tokens == -1 else f"max_tokens={max_tokens}"
        raise ValueError(
            f"max_context={max_context}: {prompt} tokens{already} and {new} are more; "
            "shorten the prompt, lower max_tokens or raise max_context"
        )
    return left if max_tokens == -1 else max_tokens


def check_prompt(
    model: Target, cache: PromptCache, prompt: int, max_tokens: int, chunk: int, *, ignore: bool
) -> None:
    """Raise ValueError if appending `prompt` tokens and `max_tokens` to `cache` needs more memory than is available.

    A max_tokens of -1, no limit, counts as one token. Nothing is checked up to UNCHECKED positions in all, with
    `ignore`, or with the environment variable IGNORE. chunk: tokens per prefill chunk.
    """
    context = cache.offset + prompt + abs(max_tokens)
    if context <= UNCHECKED or ignore or ignored():
        return
    if model.runtime.row_check:
        model.runtime.row_check.pause()  # its caches are not in the cache
    rows = min(chunk, prompt)
    if _upper_bound(model, cache, context, rows) <= memory.available().bytes + cache.nbytes:
        return
    needed = sum(_caches_and_scratch(model, cache, context, rows)) - cache.nbytes
    already = f" after {cache.offset} in the cache" if cache.offset else ""
    what = f"prompt: {prompt} tokens{already} and max_tokens={max_tokens}:"
    chunk = max(rows, FEWEST)
    check_room(what, needed, ignore=False, largest=lambda room: _largest(model, cache, room + cache.nbytes, chunk))


def make_room(
    model: Target, cache: PromptCache, prompt: int, limit: int, chunk: int, max_context: int | None, *, check: bool
) -> int:
    """Reserve positions for a prompt and new tokens; return the maximum number of new tokens, -1 for no limit.

    limit: max_tokens; at most RESERVED_TOKENS positions are reserved for new tokens. chunk: tokens per prefill chunk.
    Raises ValueError if `max_context` or, with `check`, the available memory is exceeded.
    """
    limit = within(max_context, cache.offset, prompt, limit)
    check_prompt(model, cache, prompt, limit, chunk, ignore=not check)
    cache.reserve(cache.offset + prompt + (RESERVED_TOKENS if limit == -1 else min(limit, RESERVED_TOKENS)))
    return limit
