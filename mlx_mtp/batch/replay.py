"""Record the step of cycles of several texts and replay it, as `decoding.replay` does for one text.

A recorded step serves whoever the texts are: their slots are the first of the pool, as many as a bucket holds, those
that are free among them computed for nothing, and its positions are bounded by the end of a buffer's STEP.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..cache.growing import round_up
from ..cache.kinds import from_configs
from ..cache.prompt_cache import PromptCache
from ..cache.slots import Span
from ..decoding import replay
from ..decoding.replay import Bounds, Compiled
from ..decoding.sampling import Picker, Sampling
from ..layers.target import Target
from .pool import Pool, PoolArrays
from .step import Frame, Run, step

KEPT = 32  # kinds recorded in a thread: one end of positions has one for each number of drafts and texts
HELD = 3 * replay.HELD  # bytes of launches' sources in all of them: few are too few where texts come and go


class Kind(NamedTuple):
    """All that a recorded step depends on besides the values of its inputs.

    rows: of the run before, with those that the heads have missed. end: a bound of all positions. span: the slots of
    a pass, and how many there are. layers, heads: the `config`s of a text's own caches, no heads where they have no
    part. shapes: of all arrays. starts: which caches hold nothing before some positions. pick: how tokens are chosen.
    """

    k: int
    rows: int
    end: int
    span: tuple[range, int]
    layers: tuple
    heads: tuple
    shapes: tuple
    starts: tuple[bool, ...]
    pick: tuple[Sampling, str]


class Chosen(NamedTuple):
    """How a text's tokens are chosen, where it is not known which text it is."""

    picker: Picker
    plain: bool
    tokens: tuple = ()

    def fail(self, error: Exception) -> None:
        """Raise it: no sampler or processor of a user's own has a part in what is recorded."""
        raise error


def slots_for(texts: int) -> int:
    """Round a number of slots up to the bucket that its cycles are recorded for: 1, 2, 3, 4, 6, 8, 12, 16 ..."""
    power = 1 << (texts - 1).bit_length()
    return power * 3 // 4 if power > 2 and texts <= power * 3 // 4 else power


def rounded(frame: Frame, run: Run) -> Frame:
    """Bound positions by the end of a STEP, built or replayed, so that both have the same bits."""
    return frame._replace(base=_end(frame, run) - run.size - frame.k - 1)


def _end(frame: Frame, run: Run) -> int:
    return round_up(frame.base + run.size + frame.k + 1)


def find(compiled: Compiled, frame: Frame, run: Run) -> Callable[..., tuple[Run, PoolArrays]] | None:
    """Find what does as `step` does with this frame behind such a run; None where that is to be built."""
    pool, pickers = frame.pool, [text.picker for text in frame.texts if text]
    caches = [*pool.layers, *(pool.heads if frame.heads else [])]
    pick = pickers[0].options, pickers[0].draft_sampling
    foreign = any(p.sampler or p.processors or p.logprobs or (p.options, p.draft_sampling) != pick for p in pickers)
    if foreign or not compiled.choice.on or not all(c.parts if c.is_state else c.buffers for c in caches):
        return None
    kind = _kind(frame, run, caches, pick)
    found = compiled.recall(frame.model, kind, recorded, Bounds(KEPT, HELD))
    greedy = pick[0].greedy
    keys = [] if greedy else [(text.picker if text else pickers[0]).key for text in frame.texts]
    return found and partial(found, keys=keys, starts=[c.start for c in caches])


def _kind(frame: Frame, run: Run, caches: Sequence[Any], pick: tuple[Sampling, str]) -> Kind:
    """Name a cycle's step, and give its caches room, all at once, so that they have one end."""
    end, pool = _end(frame, run), frame.pool
    for c in caches:
        if not c.is_state:
            c.hold(end, c.buffers)
    shapes = tuple(part.shape for c in caches for part in (c.parts if c.is_state else c.buffers))
    starts = tuple(not isinstance(c.start, int) for c in caches)
    layers, heads = pool.configs
    span = pool.span.slots, pool.span.count
    return Kind(frame.k, run.size, end, span, layers, heads if frame.heads else (), shapes, starts, pick)


def recorded(
    model_ref: "weakref.ref[Target]",
    kind: Kind,
    run: Run,
    arrays: PoolArrays,
    most: mx.array,
    *,
    keys: list[mx.array],
    starts: list[Any],
) -> tuple[Run, PoolArrays]:
    """Take the step of a kind on a pool of its own, which stands in for that of some texts."""
    model, (slots, count), (options, draft_sampling) = model_ref(), kind.span, kind.pick
    assert model is not None
    layers, heads = (from_configs([dict(config) for config in configs]) for configs in (kind.layers, kind.heads))
    pool = Pool(PromptCache(model, layers, heads, None, []))
    pool.live, span = bool(heads), Span(slots, count)
    for c, start in zip(pool.caches, starts, strict=True):
        c.span, c.start = span, start
    keys = keys or [mx.zeros(2, mx.uint32)] * len(slots)
    texts = [Chosen(Picker(options, key=key, draft_sampling=draft_sampling), options.greedy) for key in keys]
    base = kind.end - kind.rows - kind.k - 1
    return step(Frame(model, pool, kind.k, texts, bool(heads), base), Run(*run), PoolArrays(*arrays), most)
