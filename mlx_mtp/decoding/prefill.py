"""Read the prompt, into the target's caches and the MTP heads'."""

from collections.abc import Callable
from typing import Any, TypeVar

import mlx.core as mx

from ..cache.mark import Mark
from ..cache.prompt_cache import PromptCache
from ..cache.reread import adopt, empty_like
from ..layers.target import Target
from ..tuning.kernel_fallback import TROUBLE, Fallback, GraphFailed, run_first, vote
from .drafters import drafter_of
from .members import Single
from .pick import pick
from .run import NONE_ACCEPTED, Run
from .sampling import Picker
from .text import Text

T = TypeVar("T")


def prefill(
    model: Target,
    cache: PromptCache,
    prompt: list[int],
    *,
    heads: bool,
    step: int,
    progress: Callable[[int, int], None] | None = None,
) -> mx.array:
    """Read the prompt in chunks of `step`, with `heads` into theirs too; return the last chunk's hidden rows.

    Heads with a window wait until the first token is out: `PromptCache.reach` bounds what they read of a prompt.
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
    return hidden


def read_chunk(
    model: Target, cache: PromptCache, chunk: list[int], *, heads: bool, step: int
) -> tuple[mx.array, int]:
    """Read a chunk of the prompt, or its beginning where the caches must change; return hidden rows, and how many.

    Kernels to blame for what fails are switched off, and the chunk is read again.
    """
    fallback = Fallback(model)
    while True:
        cache.quantize_at(cache.offset)
        mark = cache.mark()
        try:
            return _read_chunk(model, cache, mark, chunk, heads=heads, step=step)
        except TROUBLE as e:
            vote(model, e)
            fallback.take(e, mark.length)
            lost = mark.caches is None
            cache.restore(mark)
            cache.settle(cache.tokens[: mark.length])
            if lost:
                read_again(model, cache, heads=heads, step=step)


def _read_chunk(
    model: Target, cache: PromptCache, mark: Mark, chunk: list[int], *, heads: bool, step: int
) -> tuple[mx.array, int]:
    """Read a chunk as `read_chunk` does; `mark`, made before it, is released when buffers are about to be written."""
    chunk = chunk[: int(min(len(chunk), cache.room(cache.offset)))]
    hidden = _read_whole(model, cache, chunk)
    if heads and cache.reach is None:
        drafter = drafter_of(model)
        assert drafter
        drafter.read(model, cache, cache.tokens, cache.primed, cache.offset - 1, step=step)
    run_first(model)
    mark.release()
    evaluated(mx.eval, hidden, cache.arrays)
    mx.clear_cache()
    return hidden, len(chunk)


def read_again(model: Target, cache: PromptCache, *, heads: bool, step: int) -> mx.array:
    """Read again all tokens that a cache, at rest, holds: its arrays were lost with a graph that failed.

    Returns the last hidden rows.
    """
    fresh = empty_like(cache)
    hidden = prefill(model, fresh, cache.tokens, heads=heads, step=step)
    adopt(cache, fresh)
    return hidden


def evaluated(evaluate: Callable[..., T], *args: Any) -> T:
    """Return evaluate(*args); raises GraphFailed for what MLX raises."""
    try:
        return evaluate(*args)
    except (RuntimeError, ValueError) as e:
        raise GraphFailed(e) from e


def without_refused(model: Target, work: Callable[..., T], *args: Any) -> T:
    """Return work(*args), which builds graphs and evaluates them; it is called again without refused kernels."""
    fallback = Fallback(model)
    while True:
        try:
            return work(*args)
        except TROUBLE as e:
            vote(model, e)
            fallback.take(e, 0)


def first_run(model: Target, cache: PromptCache, hidden: mx.array, picker: Picker) -> Run:
    """Choose the first new token behind the last of a prompt's hidden rows [1, L, H]."""
    row = hidden[:, -1:]
    member = Single(picker, Text(cache.tokens if picker.processors else ()))
    tokens, logprobs = pick(model, row, cache.offset, None, (member,))
    return Run.of(row, tokens, NONE_ACCEPTED, None, logprobs)


def test_heads(model: Target) -> None:
    """Do what a load put off until the heads are needed; it warns of heads that look wrong."""
    if model.runtime.untested is not None:
        model.runtime.untested()
        model.runtime.untested = None


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
