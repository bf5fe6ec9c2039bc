"""What a model needs, what this machine has, and what fits."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from .footprint import fill, nbytes, scratch
from .prompt_cache import make_prompt_cache

STEP = 2048  # rows of a prompt that are read at a time, where nothing else is said
LONGEST = 2**24  # positions; no longer context is looked for


@dataclass(frozen=True)
class Needs:
    """Bytes at one context: the target's weights and its heads', the KV caches of both, and scratch."""

    weights: int
    heads: int
    kv: int
    head_kv: int
    scratch: int

    @property
    def total(self) -> int:
        return self.weights + self.heads + self.kv + self.head_kv + self.scratch


@dataclass(frozen=True)
class Available:
    """Bytes that this process may still take, and what limits it ("free memory", "cgroup limit", ...)."""

    bytes: int
    limit: str


def needs(model: Any, context: int, *, step: int = STEP, **layout: Any) -> Needs:
    """What `model` takes with `context` positions, of which a prompt is read `step` at a time.

    model: loaded, or with `lazy=True`: only shapes are looked at, so that nothing is read or computed.
    layout: `make_prompt_cache`'s arguments (kv_bits, mtp_kv_bits, kv_group_size, max_kv_size, num_draft_tokens).
    """
    heads = nbytes(model.get("mtp", []))
    cache = make_prompt_cache(model, **layout)
    fill(model, cache, context, 1 + model.max_draft_tokens)
    kv, head_kv = (sum(c.nbytes for c in caches) for caches in (cache.layers, cache.heads))
    extra = scratch(model, cache, context, max(1, min(step, context)))
    return Needs(nbytes(model.parameters()) - heads, heads, kv, head_kv, extra)


def largest_context(model: Any, budget: int, *, step: int = STEP, **layout: Any) -> int:
    """The most positions whose `needs` are within `budget` bytes, 0 where not even one is; at most LONGEST."""
    low, high = 0, LONGEST
    while low < high:
        middle = (low + high + 1) // 2
        if needs(model, middle, step=step, **layout).total <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def available() -> Available:
    """The least of what limits this process."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Available(physical, "physical memory")
