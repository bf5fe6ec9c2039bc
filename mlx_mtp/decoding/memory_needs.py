"""Tell, before anything is read, what memory a model needs at a context, and what would fit here."""

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..cache.absorb import most_unread
from ..cache.prompt_cache import PromptCache, make_prompt_cache
from ..layers.target import Target
from ..machine import memory
from ..machine.memory import IGNORE, check_room, ignored, in_gb
from .graph_memory import fill, nbytes, plain_nbytes, scratch

STEP = 2048  # rows of a prompt that are read at a time, where nothing else is said
LOOPED = (3, 6)  # numbers of rows that are looked at where a layer is a loop over them
VERIFIED = 4  # rows of a cycle, which a recurrent layer keeps
SLACK = 1.4  # times the scratch that a graph tells, for MLX runs ahead: measured 0.7 to 1.3
RESERVED_TOKENS = 4096  # most new tokens that a cache takes room for at once; more is added as it is needed
UNCHECKED = 4096  # positions that a load leaves room for and a generation does not ask for
LONGEST = 2**22  # positions; no longer context is looked for
GRAIN = 256  # by which buffers grow, and contexts are tried
FEWEST = 16  # rows of a prompt from which longer contexts are told
NARROW = 256  # columns; narrower models have more heads for their width
SMALLER = (8, 4)  # kv_bits that a refusal tries


@dataclass(frozen=True)
class Needs:
    """Bytes at one context: the target's weights and its heads', the caches of both, and what a pass holds beside."""

    weights: int
    heads: int
    kv: int = 0
    head_kv: int = 0
    scratch: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.heads + self.kv + self.head_kv + self.scratch

    def __str__(self) -> str:
        parts = [f"{name.replace('_', ' ')} {in_gb(size)}" for name, size in vars(self).items() if size]
        return f"{in_gb(self.total)} GB ({', '.join(parts)})"


@dataclass(frozen=True)
class Budget:
    """The context that a load is to leave room for.

    context: positions; 0 asks for the weights alone.
    step:    rows of a prompt that are read at a time.
    layout:  arguments of `make_prompt_cache`; a kv_group_size of None is the largest that fits.
    ignore:  refuse nothing.
    """

    context: int = 0
    step: int = STEP
    layout: Mapping[str, Any] = field(default_factory=dict)
    ignore: bool = False

    def check(self, model: Target, path: Path) -> None:
        """Raise ValueError where `model`, whose weights at `path` have not been read, does not fit this machine.

        Also where it cannot have caches of that layout.
        """
        have, cache = memory.available(), make_prompt_cache(model, **self.layout)
        weights = nbytes(model.parameters())
        rough = weights + _rough(model, cache, self.context, min(self.step, self.context))
        if rough <= have.bytes or self.ignore or ignored():
            return
        found = needs(model, self.context, step=self.step, **self.layout)
        if found.total <= have.bytes:
            return
        asked = f" with max_context={self.context}" if self.context else ""
        what = ", or ".join(_fitting(model, have.bytes, self)) or "no context fits"
        there = f"{in_gb(have.bytes)} GB available ({have.limit})"
        raise ValueError(f"{path}: {found} needed{asked}, {there}; {what}; {IGNORE}=1 insists")


def needs(model: Target, context: int, *, step: int = STEP, **layout: Any) -> Needs:
    """Estimate what `model` takes with `context` positions, of which a prompt is read `step` at a time.

    model:  loaded, or with `lazy=True`, or built from a configuration: only shapes and types are looked at.
    layout: `make_prompt_cache`'s arguments. Raises its ValueError.
    """
    cache, heads = make_prompt_cache(model, **layout), nbytes([model.get("mtp", []), model.get("drafter", [])])
    beside = _beside(model, cache, context, min(step, context)) if context else ()
    return Needs(nbytes(model.parameters()) - heads, heads, *beside)


def _beside(model: Target, cache: PromptCache, context: int, rows: int) -> tuple[int, int, int]:
    """Estimate the bytes of the target's caches, of the heads', and of what reading the last `rows` holds beside.

    Where a CPU runs a recurrence row by row, two small numbers of rows tell what more of them take.
    """
    full, kv, head_kv = _filled(model, cache, context)
    if any(c.is_state for c in full.layers) and mx.default_device() == mx.cpu and rows > LOOPED[-1]:
        few, more = (scratch(model, full, context, n) for n in LOOPED)
        held = few + (more - few) * (rows - LOOPED[0]) // (LOOPED[1] - LOOPED[0])
    else:
        held = scratch(model, full, context, rows)
    return kv, head_kv, int(SLACK * held) + _logits(model)


def _rough(model: Target, cache: PromptCache, context: int, rows: int) -> int:
    """Bound `_beside` from the model's width alone: where there is as much nobody has to look closer.

    Scores of a head to every 8 columns, a wide row between layers, and keys and values as wide as the model.
    """
    width, layers = max(NARROW, model.no_hidden().shape[-1]), len(model.layers) + len(model.mtp)
    held = context + 2 * GRAIN + max((c.window or 0 for c in cache.caches), default=0)
    return 4 * width * (rows * (held // 8 + 256) + 2 * layers * held) + _logits(model)


def kv_bytes(model: Target, cache: PromptCache, context: int) -> tuple[int, int]:
    """Count the bytes of the target's and the heads' caches at `context` positions, laid out as `cache`."""
    return _filled(model, cache, context)[1:]


def _filled(model: Target, cache: PromptCache, context: int) -> tuple[PromptCache, int, int]:
    """Fill a cache of the same layout to `context` positions; count the bytes of the target's, and of the heads'.

    While nothing is drafted the target's hidden rows wait for the heads, in place of their keys and values.
    """
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
    waiting = hidden * min(context, most_unread(cache) or context) if cache.heads else 0
    return full, kv, max(head_kv, waiting)


def _logits(model: Target) -> int:
    """Count the bytes of a cycle's logits, log-probabilities, masks and orders."""
    return (1 + model.max_draft_tokens) * model.vocab_size * 4 * 4


def largest_context(model: Target, budget: int, *, step: int = STEP, **layout: Any) -> int:
    """Find the most positions, in steps of GRAIN, whose `needs` are within `budget` bytes; 0 where none is."""
    return _largest(model, make_prompt_cache(model, **layout), budget - nbytes(model.parameters()), step)


def _largest(model: Target, cache: PromptCache, room: int, step: int) -> int:
    """Find the most positions of a cache's layout whose needs beside the weights are within `room` bytes."""
    near, far = (_beside(model, cache, n * step, step)[2] for n in (2, 66))

    def total(context: int) -> int:
        beyond = context - 2 * step  # from where on what is held grows by the position
        held = near + beyond * (far - near) // (64 * step) if beyond > 0 else near * context // (2 * step)
        return sum(kv_bytes(model, cache, context)) + held

    context = GRAIN * bisect.bisect_right(range(GRAIN, LONGEST + 1, GRAIN), room, key=total)
    while context and sum(_beside(model, cache, context, min(step, context))) > room:
        context = context * 15 // 16 // GRAIN * GRAIN  # what is held does not grow evenly
    return context


def _fitting(model: Target, budget: int, asked: Budget) -> Iterator[str]:
    """Name what would fit: a shorter context, a longer one with quantized caches; nothing where weights do not."""
    plain = largest_context(model, budget, step=asked.step, **asked.layout)
    if plain:
        yield f"max_context={plain} fits"
    if asked.layout.get("kv_bits") is not None or model.NO_KV_BITS is not None:
        return
    for bits in SMALLER:
        found = largest_context(model, budget, step=asked.step, **{**asked.layout, "kv_bits": bits})
        context = min(asked.context, found)
        if context > 1.1 * plain:
            yield f"{context} with kv_bits={bits}"


def within(max_context: int | None, held: int, prompt: int, max_tokens: int) -> int:
    """Return max_tokens (-1: no limit), or what `max_context` leaves after `held` tokens and `prompt` more.

    Raises ValueError where they are too many.
    """
    if max_context is None:
        return max_tokens
    if max_context < 1:
        raise ValueError(f"max_context={max_context}: allowed is 1 or more")
    left = max_context - held - prompt
    if left < (1 if max_tokens == -1 else max_tokens):
        already = f" after {held} in the cache" if held else ""
        raise ValueError(f"max_context={max_context}: {prompt} tokens{already} and max_tokens={max_tokens} are more")
    return left if max_tokens == -1 else max_tokens


def check_prompt(model: Target, cache: PromptCache, prompt: int, max_tokens: int, step: int, *, ignore: bool) -> None:
    """Raise ValueError where reading `prompt` tokens into `cache` and writing `max_tokens` does not fit this machine.

    Of no limit, -1, one token is asked for. A model that is loaded has room for UNCHECKED positions.
    """
    context = cache.offset + prompt + abs(max_tokens)
    if context <= UNCHECKED or ignore or ignored():
        return
    rows = min(step, prompt)
    if _rough(model, cache, context, rows) <= memory.available().bytes + cache.nbytes:
        return
    needed = sum(_beside(model, cache, context, rows)) - cache.nbytes
    already = f" after {cache.offset} in the cache" if cache.offset else ""
    what = f"prompt: {prompt} tokens{already} and max_tokens={max_tokens}:"
    step = max(rows, FEWEST)
    check_room(what, needed, ignore=False, largest=lambda room: _largest(model, cache, room + cache.nbytes, step))


def make_room(
    model: Target, cache: PromptCache, prompt: int, most: int, step: int, max_context: int | None, *, check: bool
) -> int:
    """Reserve the positions of `prompt` tokens and at most `most` new ones (-1: no limit); return how many new ones
    the context allows. Raises ValueError where memory is short, if that is to be checked."""
    most = within(max_context, cache.offset, prompt, most)
    check_prompt(model, cache, prompt, most, step, ignore=not check)
    cache.reserve(cache.offset + prompt + (RESERVED_TOKENS if most == -1 else min(most, RESERVED_TOKENS)))
    return most
