"""Decode in cycles: draft, verify, accept, commit. Plain decoding is the same loop with k = 0 drafts.

One cycle is one graph. While it runs the next one is built on top of its arrays; when its tokens have arrived
(the cycle's one device-to-host read) the next is submitted, so that every cache write finds its buffer free and
happens in place. Where the next one needs those tokens (processors do) it is built when they are out. What a cycle
accepted stays on the device: the next cycle's shapes do not depend on it. How many tokens that one drafts was decided
before, from the cycles that had ended by then.
"""

from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass, replace

import mlx.core as mx

from ..cache.prompt_cache import Mark
from .cycle import PROMPT, Decoder, Flight, begin, learn, read, start, submit
from .prefill import NO_DRAFTS, prefill
from .prompt_lookup import Text

Yielded = tuple[int, mx.array | None, bool]


@dataclass
class Rest:
    """Where the caches come to rest if the caller stops now: `shown` + 1 rows into a cycle.

    mark: what the heads have read, and the states that these rows are still to be added to.
    """

    flight: Flight
    shown: int
    mark: Mark


def decode(
    d: Decoder,
    prompt: list[int],
    max_tokens: int,
    stop_tokens: Collection[int],
    progress: Callable[[int, int], None] | None = None,
) -> Generator[Yielded, None, None]:
    """Yield (token, its logprobs [V] or None, whether it was drafted) until a limit or a stop token.

    However it ends, the cache then holds all tokens but the last one yielded.
    """
    d.stats.start()
    flight = first = _prompt(d, prompt, progress)
    newest, left = flight.after, max_tokens
    rest = Rest(flight, 0, newest)
    try:
        while left != 0:
            # The first token goes out before anything else is done, the heads' reading of the prompt included.
            late = None if flight is first else d.needs_host(flight)
            following = None if late or flight is first else begin(d, flight)
            tokens, accepted = read(d, flight)
            tokens, last = _cut(tokens, left, stop_tokens)
            d.text.extend(tokens)
            if following and not last:
                newest, rest = following.before, _unshown(flight, following)
                submit(d, flight, following, accepted)
            learn(d, flight, accepted, following)
            for i, token in enumerate(tokens):
                rest = Rest(flight, i, newest)
                d.stats.yields()
                yield token, None if flight.run.logprobs is None else flight.run.logprobs[i], i < accepted
                d.stats.resumed()
            if last:
                return
            if following is None:
                d.stats.builds_late(late)
                position = flight.base + accepted + 1
                d.cache.quantize_at(position)
                following = begin(d, flight, d.cache.room(position) - 1)
                newest, rest = following.before, Rest(flight, len(tokens) - 1, following.before)
                submit(d, flight, following, accepted)
            flight, newest, left = following, following.after, left - len(tokens)
    finally:
        _settle(d, rest, newest)


def _prompt(d: Decoder, prompt: list[int], progress: Callable[[int, int], None] | None) -> Flight:
    """Read the prompt and submit the choice of the first token, as the first of all cycles."""
    cache = d.cache
    run = prefill(d.model, cache, prompt, d.picker, heads=d.k > 0, step=d.step, progress=progress)
    d.text = Text(cache.tokens)
    start(d, run)
    cache.pop_row()
    mark = cache.mark()
    flight = Flight(PROMPT, mark, NO_DRAFTS)
    flight.run, flight.after, flight.base = run, mark, cache.offset - 1
    return flight


def _unshown(flight: Flight, following: Flight) -> Rest:
    """Rest before any row of `flight`, whose successor is built: a plain row comes out of the states again."""
    return Rest(flight, -1, replace(following.before, held=flight.before.held, caches=None))


def _cut(tokens: list[int], left: int, stop_tokens: Collection[int]) -> tuple[list[int], bool]:
    """Cut a run's tokens to what may be shown, and tell whether it is the last; left < 0 means no limit."""
    for i, token in enumerate(tokens, 1):
        if token in stop_tokens or i == left:
            return tokens[:i], True
    return tokens, False


def _settle(d: Decoder, rest: Rest, newest: Mark) -> None:
    """Bring the caches to rest: drop the cycle built but not submitted, take back what was not shown."""
    cache, flight = d.cache, rest.flight
    cache.restore(newest)
    rest.mark.release()
    cache.restore(rest.mark)
    rows = rest.shown + 1
    if rows:
        cache.push(flight.run.hidden[:, :rows])
    cache.settle(d.text.tokens[: flight.base + rows].tolist())
