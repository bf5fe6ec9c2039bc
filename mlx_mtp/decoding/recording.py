"""State a cycle as a function of arrays alone, which can be recorded: the run before, caches, the draws' key.

All else that it depends on is its `Kind`. Positions that the host bounds are bounded by `Kind.end`, so that what is
recorded serves every cycle until a buffer's next STEP, in this conversation and in others.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from ..cache.growing import round_up
from ..cache.kinds import from_configs
from ..cache.prompt_cache import PromptCache
from ..layers.target import Target
from ..tuning.controller import Fixed, Plan
from .cycle import Decoder, Flight, verify
from .draft import Drafts, Run, draft
from .draft_sampling import DraftChooser
from .prefill import NO_DRAFTS, NONE_ACCEPTED
from .sampling import Picker, Sampling
from .stats import Stats


class Kind(NamedTuple):
    """All that a recorded cycle depends on besides the values of its inputs.

    rows: of the run before. end: a bound of all positions. layers, heads: the caches' `config`s, no heads where they
    are idle. shapes: of all caches' arrays. pick: how tokens are chosen.
    """

    plan: Plan
    rows: int
    end: int
    layers: tuple
    heads: tuple
    shapes: tuple
    pick: tuple[Sampling, bool, str]

    @classmethod
    def of(cls, d: Decoder, last: Flight, plan: Plan, caches: Sequence[Any]) -> "Kind":
        """Name the cycle after `last`, and give the caches room, all at once, so that they have one end."""
        base, rows, n = last.base, last.run.tokens.size, len(d.cache.layers)
        end = round_up(base + rows + plan.k + 1)
        for c in caches:
            c.hold(end)
        layouts = tuple(_layout(c, base) for c in caches)
        shapes = tuple(part.shape for c in caches for part in c.parts)
        pick = d.picker.options, d.picker.logprobs, d.picker.draft_sampling
        return cls(plan, rows, end, layouts[:n], layouts[n:], shapes, pick)


def _layout(c: Any, base: int) -> tuple:
    """Return a cache's `config`, without a start that is not behind the first position of `base`'s window."""
    config = c.config
    if c.wraps and c.start <= base - c.window + 1:
        config["start"] = 0
    return tuple(config.items())


def recorded(
    model_ref: "weakref.ref[Target]",
    kind: Kind,
    given: list,
    guesses: list,
    ends: list,
    parts: list,
    kept: list,
    key: mx.array,
):
    """Run the cycle of a kind on caches of its own, which stand in for a conversation's.

    given:   of the run before: hidden, tokens, and accepted if it had drafts.
    guesses: the drafts, if they are not the heads'.
    ends:    the target's position and, if they draft, the heads'.
    parts:   each cache's arrays.
    Returns the run's arrays by their names, the target's position, parts and kept.
    """
    model, plan, n = model_ref(), kind.plan, len(kind.layers)
    assert model is not None
    caches = from_configs([dict(config) for config in (*kind.layers, *kind.heads)])
    cache = PromptCache(model, caches[:n], caches[n:], None, list(kept))
    cache.live = bool(kind.heads)
    for c, arrays in zip(caches, parts, strict=True):
        c.parts = tuple(arrays)
        c.seek(ends[0], 0)
    for c in cache.heads:
        c.seek(ends[1], 0)
    cache.bound(kind.end - kind.rows - plan.k - 1, kind.rows)
    hidden, tokens, accepted = [*given, NONE_ACCEPTED][:3]
    run = Run(hidden, tokens, accepted, tokens[1:], tokens, None)
    options, logprobs, draft_sampling = kind.pick
    picker = Picker(options, logprobs=logprobs, key=key, draft_sampling=draft_sampling)
    drafts = Drafts(guesses[0]) if guesses else NO_DRAFTS
    if kind.heads:
        drafts = draft(model, cache, run, plan.k, DraftChooser.of(picker))
    new = verify(Decoder(model, cache, picker, Fixed(plan.k), Stats(), step=1, k=plan.k), run, drafts)
    made = {"hidden": new.hidden, "tokens": new.tokens, "packed": new.packed}
    if plan.k:
        made |= {"accepted": new.accepted, "drafts": new.drafts}
    if new.logprobs is not None:
        made["logprobs"] = new.logprobs
    return made, cache.layers[0].offset, [c.parts for c in caches], cache.kept
