"""The loop: draft, verify, accept, commit. Plain decoding is the same loop with k = 0 drafts.

One cycle is one graph. While it runs the next one is built on top of its arrays; when its tokens have arrived
(the cycle's one device-to-host read) the next is submitted, so that every cache write finds its buffer free and
happens in place. Where the next one needs those tokens (processors do) it is built when they are out. What a cycle
accepted stays on the device: the next cycle's shapes do not depend on it.
"""

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .accept import accept
from .draft import Drafts, Run, draft, prime
from .draft_choice import DraftChooser
from .prompt_cache import Mark, PromptCache
from .sampling import Picker
from .stats import Stats

Yielded = tuple[int, mx.array | None, bool]
NONE_ACCEPTED = mx.zeros(1, mx.int32)


@dataclass
class Rest:
    """Where the caches come to rest if the caller stops now: `shown` tokens into `run`, which began at `base`."""

    run: Run
    base: int
    shown: int
    mark: Mark


def prefill(
    model: Any,
    cache: PromptCache,
    prompt: list[int],
    picker: Picker,
    *,
    k: int,
    step: int,
    progress: Callable[[int, int], None] | None = None,
) -> Run:
    """Read the prompt in chunks of `step` and choose the first new token.

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
        if k and cache.reach is None:
            prime(model, cache, cache.primed, cache.offset - 1, step=step)
        mx.eval(hidden, cache.arrays)
        mx.clear_cache()
    if progress:
        progress(len(prompt), len(prompt))
    row = hidden[:, -1:]
    none = mx.zeros(0, mx.int32)
    tokens, logprobs = picker.pick(model, row, cache.offset, cache.tokens, none)
    return Run.of(row, tokens, NONE_ACCEPTED, none, logprobs)


def _read_chunk(model: Any, cache: PromptCache, chunk: list[int]) -> mx.array:
    """Put one chunk of the prompt into the target's caches; an interruption leaves all of it or nothing."""
    mark = cache.mark()
    try:
        hidden = model.hidden(mx.array(chunk)[None], cache.layers)
    except BaseException:
        cache.restore(mark)
        raise
    cache.tokens = cache.tokens + chunk
    cache.push(hidden)
    return hidden


def cycle(model: Any, cache: PromptCache, run: Run, base: int, k: int, picker: Picker, history: list[int]) -> Run:
    """Build one cycle on top of `run`, whose first row is position `base`: draft k tokens, verify, accept, commit.

    `history`: the tokens up to the newest one, read only where the sampling needs it on the host.
    """
    cache.bound(base, run.tokens.size)
    if cache.drafting:
        drafted = draft(model, cache, run, k, DraftChooser.of(picker))
    else:
        drafted = Drafts(run.drafts)
        cache.push(run.hidden)
    drafts, position = drafted.tokens, cache.layers[0].offset + 1
    hidden = model.hidden(mx.concatenate([run.newest(), drafts])[None] if k else run.newest()[None], cache.layers)
    tokens, logprobs = picker.pick(model, hidden, position, history, drafts, drafted.q)
    accepted = NONE_ACCEPTED
    if k:
        accepted = accept(drafts, tokens)
        cache.rollback(k - accepted)
    return Run.of(hidden, tokens, accepted, drafts, logprobs)


def submit(cache: PromptCache, run: Run, stats: Stats) -> None:
    """Start computing a cycle. Every so often wait for its two halves instead, to learn what each costs."""
    if stats.times_next():
        stats.time_halves(run.drafts, run.packed)
    logprobs = [] if run.logprobs is None else [run.logprobs]
    mx.async_eval(run.packed, *logprobs, *cache.arrays)


def decode(
    model: Any,
    cache: PromptCache,
    prompt: list[int],
    picker: Picker,
    stats: Stats,
    *,
    k: int,
    max_tokens: int,
    stop_tokens: Collection[int],
    prefill_step_size: int,
    progress: Callable[[int, int], None] | None = None,
) -> Generator[Yielded, None, None]:
    """Yield (token, its logprobs [V] or None, whether it was drafted) until a limit or a stop token.

    However it ends, the cache then holds all tokens but the last one yielded.
    """
    stats.start()
    run = first = prefill(model, cache, prompt, picker, k=k, step=prefill_step_size, progress=progress)
    known, base, left = list(cache.tokens), cache.offset - 1, max_tokens
    cache.pop_row()
    submit(cache, run, stats)
    mark = cache.mark()
    rest = Rest(run, base, 0, mark)
    try:
        while left != 0:
            following = None
            # The first token goes out before anything else is done, the heads' reading of the prompt included.
            if run is not first and not picker.processors and cache.builds_ahead(base + run.tokens.size, k + 1):
                following = cycle(model, cache, run, base, k, picker, known)
            tokens, accepted = run.read()
            stats.arrived(accepted, run.drafts.size)
            tokens, last = _cut(tokens, left, stop_tokens)
            known += tokens
            if following and not last:
                mark.release()
                submit(cache, following, stats)
            for i, token in enumerate(tokens):
                rest = Rest(run, base, i, mark)
                stats.yields()
                yield token, None if run.logprobs is None else run.logprobs[i], i < accepted
            if last:
                return
            stats.resumed()
            if following is None:
                _catch_up(model, cache, base, accepted, k, prefill_step_size)
                fitting = int(min(k, cache.room(base + accepted + 1) - 1))
                following = cycle(model, cache, run, base, fitting, picker, known)
                mark.release()
                submit(cache, following, stats)
            run, base, left = following, base + accepted + 1, left - len(tokens)
            cache.advance(base)
            mark = cache.mark()
    finally:
        _settle(cache, known, rest, mark)


def _catch_up(model: Any, cache: PromptCache, base: int, accepted: int, k: int, step: int) -> None:
    """What a cycle needs that was not built ahead: heads that have read the prompt, caches quantized when due."""
    if k and not cache.drafting:
        prime(model, cache, base - sum(rows.shape[1] for rows in cache.backlog), base, step=step)
        cache.start_drafting()
    cache.quantize_at(base + accepted + 1)


def _cut(tokens: list[int], left: int, stop_tokens: Collection[int]) -> tuple[list[int], bool]:
    """The part of a run that may be shown, and whether it is the last; left < 0 means no limit."""
    for i, token in enumerate(tokens, 1):
        if token in stop_tokens or i == left:
            return tokens[:i], True
    return tokens, False


def _settle(cache: PromptCache, known: list[int], rest: Rest, newest: Mark) -> None:
    """Bring the caches to rest: drop the cycle built but not submitted, take back what was not shown."""
    cache.restore(newest)
    cache.primed, cache.kept, cache.backlog = rest.mark.primed, rest.mark.kept, list(rest.mark.backlog)
    cache.push(rest.run.hidden[:, : rest.shown + 1])
    cache.settle(known[: rest.base + rest.shown + 1])
