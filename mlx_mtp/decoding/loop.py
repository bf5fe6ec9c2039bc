"""Decode in cycles: draft, verify, accept, commit. Plain decoding is the same loop with k = 0 drafts.

One cycle is one graph of one step (`step.py`). While it runs the next one is built on top of its arrays; when its
tokens have arrived (the cycle's one device-to-host read, but where the heads' confidence is read, too) the next is
submitted, so that every cache write finds its buffer free and happens in place:

    host    | begin 2      | read 1, submit 2 | learn, yield 1, begin 3      | read 2, submit 3 | ...
    device  | cycle 1 ─────┤                  | cycle 2 ─────────────────────┤                  | cycle 3 ── ...

Where the next one needs those tokens (processors do) it is built when they are out. What a cycle accepted stays on
the device: the next cycle's shapes do not depend on it. How many tokens that one drafts was decided before, from the
cycles that had ended by then.
"""

from collections.abc import Callable, Collection, Generator

import mlx.core as mx

from ..tuning.kernel_fallback import TROUBLE, GraphFailed, KernelRefused, Trouble
from .cycle import Decoder, Flight, begin, builds_ahead, learn, read, read_prompt, submit
from .prefill import test_heads
from .recovery import resume, settle

Yielded = tuple[int, mx.array | None, bool]


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
    if d.k:
        test_heads(d.model)
    d.stats.start()
    first = read_prompt(d, prompt, progress)
    try:
        yield from cycles(d, first, max_tokens, stop_tokens)
    finally:
        settle(d)


def cycles(d: Decoder, cycle: Flight, left: int, stop_tokens: Collection[int]) -> Generator[Yielded, None, None]:
    """Yield the tokens of a cycle that is under way and of those after it; left < 0 means no limit."""
    while left != 0:
        try:
            ahead, (tokens, over) = _advance(d, cycle, left, stop_tokens)
        except GraphFailed as e:  # none of its tokens has been shown
            d.newest.failed = True
            cycle = _resumed(d, e)
            continue
        learn(d, cycle)
        for i, token in enumerate(tokens):
            d.shown, d.rows = cycle, i + 1
            d.stats.yields()
            d.clock.leave()
            yield token, cycle.run.logprobs_of(i), i < cycle.accepted
            d.clock.resume()
        if over:
            return
        cycle, left = following(d, cycle, ahead), left - len(tokens)


def _advance(
    d: Decoder, cycle: Flight, left: int, stop_tokens: Collection[int]
) -> tuple[Flight | Trouble | None, tuple[list[int], bool]]:
    """Build the cycle after this one, read this one's tokens and submit that one.

    Returns it, None where it cannot be built yet, or why it failed; and the tokens, and whether they are the last.
    """
    ahead: Flight | Trouble | None = None
    try:
        ahead = begin(d, cycle) if builds_ahead(d, cycle) and not d.ended else None  # the device is busy meanwhile
    except KernelRefused as e:
        ahead = e
    built = ahead if isinstance(ahead, Flight) else None
    tokens, over = _cut(read(d, cycle, built), left, stop_tokens)  # the one wait
    over = over or d.ended
    try:
        if isinstance(ahead, Flight) and not over:
            submit(d, cycle, ahead)
    except TROUBLE as e:
        ahead, d.newest.failed = e, isinstance(e, GraphFailed)
    return ahead, (tokens, over)


def following(d: Decoder, cycle: Flight, ahead: Flight | Trouble | None) -> Flight:
    """Return the cycle after this one, whose tokens are out: what was built ahead, or a new one."""
    if isinstance(ahead, TROUBLE):
        return _resumed(d, ahead)
    try:
        return ahead or _submit_late(d, cycle)
    except TROUBLE as e:
        d.newest.failed = isinstance(e, GraphFailed)
        return _resumed(d, e)


def _resumed(d: Decoder, error: Trouble) -> Flight:
    """Go on without the kernels to blame for an error; return the cycle whose tokens come next."""
    while True:
        try:
            first = resume(d, error)
            return _submit_late(d, first) if len(d.text.tokens) > first.base + 1 else first
        except TROUBLE as e:
            error, d.newest.failed = e, isinstance(e, GraphFailed)


def _cut(tokens: list[int], left: int, stop_tokens: Collection[int]) -> tuple[list[int], bool]:
    """Cut a cycle's tokens to what may be shown, and tell whether it is the last; left < 0 means no limit."""
    for i, token in enumerate(tokens, 1):
        if token in stop_tokens or i == left:
            return tokens[:i], True
    return tokens, False


def _submit_late(d: Decoder, last: Flight) -> Flight:
    """Build and submit the cycle after `last` when the tokens of that one are out, and its caches can be changed."""
    if last.late:
        d.stats.built_late[last.late] += 1
    position = last.base + last.accepted + 1
    d.cache.quantize_at(position)
    last.after.release()
    last.after = d.cache.mark()
    new = begin(d, last, d.cache.room(position) - 1)
    new.began_late = True
    submit(d, last, new)
    return new
