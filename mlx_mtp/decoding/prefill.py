"""Prefill a prompt in chunks, into the target's caches and the MTP heads'."""

from collections.abc import Callable
from typing import Any, TypeVar

import mlx.core as mx

from ..cache.prompt_cache import PromptCache
from ..cache.reread import rebuilt
from ..layers.target import Target
from ..tuning.kernel_fallback import TROUBLE, Fallback, GraphFailed, run_first, vote
from .drafters import drafter_of
from .history import TokenHistory
from .masks import mask_row
from .members import Single
from .pick import pick
from .picture_rows import drop_features, hidden_rows, up_to_edge
from .run import NONE_ACCEPTED, Run
from .sampling import Picker

T = TypeVar("T")


def prefill(
    model: Target,
    cache: PromptCache,
    prompt: list[int],
    *,
    heads: bool,
    chunk: int,
    progress: Callable[[int, int], None] | None = None,
) -> mx.array:
    """Prefill the prompt in chunks of at most `chunk` tokens; return the last chunk's hidden rows [1, L, H].

    heads: also prefill the MTP heads. Heads with windows are not prefilled here: when they first draft they read the
    last `PromptCache.reach` rows. progress: called with (tokens read, tokens) before each chunk and at the end.
    """
    hidden = model.no_hidden()
    done = 0
    while done < len(prompt):
        if progress:
            progress(done, len(prompt))
        hidden, read = read_chunk(model, cache, prompt[done : done + chunk], heads=heads, chunk=chunk)
        done += read
    if progress:
        progress(len(prompt), len(prompt))
    return hidden


def read_chunk(
    model: Target, cache: PromptCache, tokens: list[int], *, heads: bool, chunk: int
) -> tuple[mx.array, int]:
    """Prefill one chunk, `tokens`; return its hidden rows [1, n, H], evaluated, and the number n of tokens read.

    Only the tokens before the position at which caches must be quantized, or before a picture's begin or end, are
    read. After an error that `Fallback.take` handles they are read again. If `cache.reach` is None, the drafter reads
    all but the newest, `chunk` at a time, with `heads` or if it `absorbs`. Raises ValueError as `features_of`.
    """
    fallback = Fallback(model)
    while True:
        cache.quantize_at(cache.offset)
        mark = cache.mark()
        n = int(min(up_to_edge(cache, tokens), cache.room(cache.offset)))
        try:
            hidden = _append(model, cache, tokens[:n])
            drafter = drafter_of(model)
            if drafter and (heads or drafter.absorbs) and cache.reach is None:
                drafter.read(model, cache, cache.ids, cache.primed, cache.offset - 1, step=chunk)
            run_first(model)
            mark.release()  # buffers are then written in place
            evaluated(mx.eval, hidden, cache.arrays)
            mx.clear_cache()
            drop_features(cache)
            return hidden, n
        except TROUBLE as e:
            vote(model, e)
            fallback.take(e, mark.length)
            lost = mark.caches is None
            cache.restore(mark)
            cache.settle(cache.tokens[: mark.length])
            if lost:
                read_again(model, cache, heads=heads, chunk=chunk)


def read_again(model: Target, cache: PromptCache, *, heads: bool, chunk: int) -> mx.array:
    """Prefill all tokens of a cache whose arrays a failed graph has lost; return the last chunk's rows [1, L, H]."""
    with rebuilt(cache) as fresh:
        return prefill(model, fresh, cache.tokens, heads=heads, chunk=chunk)


def evaluated(evaluate: Callable[..., T], *args: Any) -> T:
    """Return evaluate(*args); raises GraphFailed instead of MLX's RuntimeError or ValueError."""
    try:
        return evaluate(*args)
    except (RuntimeError, ValueError) as e:
        raise GraphFailed(e) from e


def without_refused(model: Target, work: Callable[..., T], *args: Any) -> T:
    """Return work(*args), which builds and evaluates graphs; repeat it without kernels that are refused or fail."""
    fallback = Fallback(model)
    while True:
        try:
            return work(*args)
        except TROUBLE as e:
            vote(model, e)
            fallback.take(e, 0)


def first_run(model: Target, cache: PromptCache, hidden: mx.array, picker: Picker) -> Run:
    """Return the run, unevaluated, that chooses the token after a prompt from its hidden rows [1, L, H]."""
    row = hidden[:, -1:]
    member = Single(picker, TokenHistory(cache.ids if picker.processors else ()))
    masks = mask_row(picker.matcher, cache.ids)
    tokens, logprobs = pick(model, row, cache.offset, None, (member,), masks)
    return Run.of(row, tokens, NONE_ACCEPTED, None, logprobs)


def test_heads(model: Target) -> None:
    """Run the self-test of the heads if the load postponed it; it warns if the heads look wrong."""
    if model.runtime.untested is not None:
        model.runtime.untested()
        model.runtime.untested = None


def _append(model: Target, cache: PromptCache, tokens: list[int]) -> mx.array:
    """Append tokens to the target's caches, or none if this raises; return the hidden rows [1, L, H], unevaluated."""
    mark = cache.mark()
    try:
        hidden = hidden_rows(model, cache, tokens)
        cache.push(hidden)
    except BaseException:
        cache.restore(mark)
        raise
    cache.tokens = cache.tokens + tokens
    return hidden
