"""Run one cycle as a pure function of arrays: propose drafts, verify them in one pass of the target, accept.

This one function is what runs where a cycle is built, and what `mx.compile` records where cycles are replayed. Its
two halves are for those who look at the drafts in between: cycles that read the heads' confidence, and the profile.
"""

from typing import Any, NamedTuple

import mlx.core as mx

from ..cache.prompt_cache import CacheArrays, PromptCache
from ..layers.target import Target
from ..tuning.plan import Plan
from .accept import accept
from .draft import NO_DRAFTS, NONE_ACCEPTED, Drafts, Run, draft
from .draft_sampling import DraftChooser
from .sampling import Picker


class Frame(NamedTuple):
    """All of a cycle that is no array, but for the key of `picker`'s draws.

    cache: holds the arrays for the time of the step. plan: who drafts, and how many.
    base:  the first position of the rows before, or a bound of it.
    text:  token ids [T] that logits processors see.
    """

    model: Target
    cache: PromptCache
    plan: Plan
    picker: Picker
    base: int
    text: Any = ()


def step(frame: Frame, run: Run, arrays: CacheArrays, guesses: Drafts = NO_DRAFTS) -> tuple[Run, CacheArrays]:
    """Propose, verify and accept behind the rows of `run`; return the next run and the caches' arrays after it.

    guesses: drafts of the text's own past, where the plan's source is "lookup".
    """
    drafts = propose(frame, run, arrays, guesses)
    return verify(frame, run, drafts), frame.cache.unload()


def propose(frame: Frame, run: Run, arrays: CacheArrays, guesses: Drafts = NO_DRAFTS) -> Drafts:
    """Take the caches' arrays in, let the MTP heads read the rows of `run` and draft; or take the guesses."""
    frame.cache.load(arrays, frame.base + run.size, frame.base)
    if frame.plan.k and frame.plan.source == "heads":
        chooser = DraftChooser.of(frame.picker, confidence=frame.plan.p_min)
        return draft(frame.model, frame.cache, run, frame.plan.k, chooser)
    return guesses


def verify(frame: Frame, run: Run, drafts: Drafts) -> Run:
    """Choose the target's own tokens after the newest one and each draft; count the drafts that equal them."""
    model, cache, guesses = frame.model, frame.cache, drafts.tokens
    position, rows = cache.layers[0].offset + 1, run.newest()
    if guesses.size:
        rows = mx.concatenate([rows, guesses])
    hidden = model.hidden(rows[None], cache.layers)
    tokens, logprobs = frame.picker.pick(model, hidden, position, frame.text, guesses)
    accepted = NONE_ACCEPTED
    if guesses.size:
        accepted = accept(guesses, tokens)
        cache.rollback(guesses.size - accepted)
    return Run.of(hidden, tokens, accepted, guesses, logprobs)
