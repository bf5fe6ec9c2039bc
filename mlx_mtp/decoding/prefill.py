"""Read the prompt, into the target's caches and the MTP heads'."""

from collections.abc import Callable

import mlx.core as mx

from ..cache.prompt_cache import PromptCache
from ..layers.target import Target
from .draft import NO_DRAFTS, NONE_ACCEPTED, Run, prime
from .sampling import Picker


def prefill(
    model: Target,
    cache: PromptCache,
    prompt: list[int],
    picker: Picker,
    *,
    heads: bool,
    step: int,
    progress: Callable[[int, int], None] | None = None,
) -> Run:
    """Read the prompt in chunks of `step` and choose the first new token; with `heads`, let them read it, too.

    Heads with a window wait until that token is out: what they read of a prompt is bounded (`PromptCache.reach`).
    """
    hidden = model.no_hidden()
    done = 0
    while done < len(prompt):
        if progress:
            progress(done, len(prompt))
        hidden, read = read_chunk(model, cache, prompt[done : done + step], heads=heads, step=step)
        done += read
    if progress:
        progress(len(prompt), len(prompt))
    return first_run(model, cache, hidden, picker)


def read_chunk(
    model: Target, cache: PromptCache, chunk: list[int], *, heads: bool, step: int
) -> tuple[mx.array, int]:
    """Read a chunk of the prompt, or its beginning where the caches must change; return hidden rows, and how many."""
    cache.quantize_at(cache.offset)
    chunk = chunk[: int(min(len(chunk), cache.room(cache.offset)))]
    hidden = _read_whole(model, cache, chunk)
    if heads and cache.reach is None:
        prime(model, cache, cache.tokens, cache.primed, cache.offset - 1, step=step)
    mx.eval(hidden, cache.arrays)
    mx.clear_cache()
    return hidden, len(chunk)


def first_run(model: Target, cache: PromptCache, hidden: mx.array, picker: Picker) -> Run:
    """Choose the first new token behind the last of a prompt's hidden rows [1, L, H]."""
    row = hidden[:, -1:]
    tokens, logprobs = picker.pick(model, row, cache.offset, cache.tokens, NO_DRAFTS.tokens)
    return Run.of(row, tokens, NONE_ACCEPTED, NO_DRAFTS.tokens, logprobs)


def test_heads(model: Target) -> None:
    """Do what a load put off until the heads are needed; it warns of heads that look wrong."""
    if model.untested is not None:
        model.untested()
        model.untested = None


def _read_whole(model: Target, cache: PromptCache, chunk: list[int]) -> mx.array:
    """Put a chunk of the prompt into the target's caches; an interruption leaves all of it or nothing."""
    mark = cache.mark()
    try:
        hidden = model.hidden(mx.array(chunk)[None], cache.layers)
        cache.push(hidden)
    except BaseException:
        cache.restore(mark)
        raise
    cache.tokens = cache.tokens + chunk
    return hidden
