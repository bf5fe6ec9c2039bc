"""Run one step of n sequences as a pure function of arrays: propose drafts, verify them in one pass, accept.

One sequence is n = 1. All have R rows, whatever they accept or may draft: what is drafted for one beyond its own
share is verified and not accepted. This one function is what runs where a step is built, and what `mx.compile`
records where steps are replayed. Its two halves are for those who look at the drafts in between: steps that read the
drafter's confidence, and the profile. Whatever drafts is behind the interface of `drafters/drafter.py`.
"""

import mlx.core as mx

from ..cache.step_cache import CacheArrays
from .accept import accept
from .drafters.drafter import Frame
from .pick import pick
from .run import NO_DRAFTS, NONE_ACCEPTED, Drafts, Run


def step(
    frame: Frame, run: Run, arrays: CacheArrays, guesses: Drafts = NO_DRAFTS, most: mx.array | None = None
) -> tuple[Run, CacheArrays]:
    """Propose, verify and accept behind the rows of `run`; return the next run and the caches' arrays after it.

    guesses: drafts that were made before the step. most: int32 [n] of drafts that each may accept, None for all.
    """
    drafts = propose(frame, run, arrays, guesses)
    return verify(frame, run, drafts, most), frame.cache.unload()


def propose(frame: Frame, run: Run, arrays: CacheArrays, guesses: Drafts = NO_DRAFTS) -> Drafts:
    """Take the caches' arrays in, let the drafter read the rows of `run` and draft; or take the guesses."""
    frame.cache.load(arrays, frame.base + run.size, frame.base)
    if frame.drafter is None:
        return guesses
    drafts = frame.drafter.propose(frame, run, frame.asked)
    return drafts if frame.asked else guesses


def verify(frame: Frame, run: Run, drafts: Drafts, most: mx.array | None = None) -> Run:
    """Choose the target's own tokens after the newest one and each draft; count the drafts that equal them."""
    model, cache, guesses = frame.model, frame.cache, drafts.tokens
    position, rows = cache.layers[0].offset + 1, run.newest()
    if guesses is not None:
        rows = mx.concatenate([rows, guesses], axis=1)
    hidden = model.hidden(rows, cache.layers)
    tokens, logprobs = pick(model, hidden, position, guesses, frame.members)
    accepted = NONE_ACCEPTED if len(frame.members) == 1 else mx.zeros(len(frame.members), mx.int32)
    if guesses is not None:
        accepted = accept(guesses, tokens)
    if most is not None:
        accepted = mx.minimum(accepted, most)
    if guesses is not None or most is not None:
        cache.rollback(drafts.k - accepted)
    return Run.of(hidden, tokens, accepted, guesses, logprobs)
