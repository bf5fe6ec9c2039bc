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

    Heads with a window wait until that token is out: what they can see of a prompt is bounded (`PromptCache.reach`).
    """
    hidden = model.no_hidden()
    done = 0
    while done < len(prompt):
        if progress:
            progress(done, len(prompt))
        cache.quantize_at(cache.offset)
        chunk = prompt[done : done + int(min(step, cache.room(cache.offset)))]
        done += len(chunk)
        hidden = _read_chunk(model, cache, chunk)
        if heads and cache.reach is None:
            prime(model, cache, cache.tokens, cache.primed, cache.offset - 1, step=step)
        mx.eval(hidden, cache.arrays)
        mx.clear_cache()
    if progress:
        progress(len(prompt), len(prompt))
    row = hidden[:, -1:]
    tokens, logprobs = picker.pick(model, row, cache.offset, cache.tokens, NO_DRAFTS.tokens)
    return Run.of(row, tokens, NONE_ACCEPTED, NO_DRAFTS.tokens, logprobs)


def test_heads(model: Target) -> None:
    """Do what a load put off until the heads are needed; it warns of heads that look wrong."""
    if model.untested is not None:
        model.untested()
        model.untested = None


def _read_chunk(model: Target, cache: PromptCache, chunk: list[int]) -> mx.array:
    """Put one chunk of the prompt into the target's caches; an interruption leaves all of it or nothing."""
    mark = cache.mark()
    try:
        hidden = model.hidden(mx.array(chunk)[None], cache.layers)
        cache.push(hidden)
    except BaseException:
        cache.restore(mark)
        raise
    cache.tokens = cache.tokens + chunk
    return hidden
