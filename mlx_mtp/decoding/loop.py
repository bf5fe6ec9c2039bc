"""Decode in cycles: draft, verify, accept. Plain decoding is the same loop with 0 drafts per cycle.

The host builds cycle N+1 on the unevaluated arrays of cycle N while the device computes N. It submits N+1 only after
it has read N's tokens, so that no pending work refers to the cache buffers and every write happens in place:

    host    begin N+1 | read N (waits), submit N+1 | observe N, yield N's tokens, begin N+2 | read N+1, submit N+2 ...
    device  N ─────────────────┤                   N+1 ──────────────────────────────────────────┤             N+2 ...

The read is the only wait of a cycle, except with p_min, where `submit` also reads the confidence of the drafts, and
with a grammar, where it reads the drafts while the device computes the target's pass, and writes the masks. The
accepted count stays on the device: shapes do not depend on it. The plan of N+1 is made before N is read. A cycle
whose logits processors need N's tokens is begun after they are yielded.
"""

from collections.abc import Callable, Collection, Generator

import mlx.core as mx

from ..grammar import GrammarError
from ..tuning.kernel_fallback import TROUBLE, GraphFailed, KernelRefused, Trouble
from .cycle import Decoder, Flight, begin, can_build_ahead, observe, prefill_prompt, read, redraft, submit
from .prefill import test_heads
from .recovery import resume, settle

Yielded = tuple[int, mx.array | None, bool]
Ahead = Flight | Trouble | GrammarError | None


def decode(
    d: Decoder,
    prompt: list[int],
    max_tokens: int,
    stop_tokens: Collection[int],
    progress: Callable[[int, int], None] | None = None,
) -> Generator[Yielded, None, None]:
    """Yield (token, its logprobs [V] or None, whether it was drafted) for each new token, the stop token included.

    Ends after max_tokens (-1: no limit) or one of the stop tokens. Then, and also after `close()`, the cache contains
    every token but the last one yielded. progress: called with (prompt tokens read, prompt tokens).
    """
    if d.k:
        test_heads(d.model)
    d.stats.start()
    first = prefill_prompt(d, prompt, progress)
    try:
        yield from cycles(d, first, max_tokens, stop_tokens)
    finally:
        d.thread.shutdown()
        settle(d)


def cycles(d: Decoder, cycle: Flight, left: int, stop_tokens: Collection[int]) -> Generator[Yielded, None, None]:
    """Yield as `decode` for a submitted cycle and the next ones, up to `left` (-1: no limit) or a stop token."""
    while left != 0:
        try:
            ahead, tokens, done = _advance(d, cycle, left, stop_tokens)
        except GraphFailed as e:  # none of its tokens has been yielded
            d.submitted.failed = True
            cycle = _restart(d, e)
            continue
        observe(d, cycle)
        for i, token in enumerate(tokens):
            d.emitting, d.emitted = cycle, i + 1
            d.stats.count_token()
            d.clock.leave()
            yield token, cycle.run.logprobs_of(i), i < cycle.accepted
            d.clock.resume()
        if done:
            return
        cycle, left = next_cycle(d, cycle, ahead), left - len(tokens)


def _advance(d: Decoder, cycle: Flight, left: int, stop_tokens: Collection[int]) -> tuple[Ahead, list[int], bool]:
    """Build the next cycle, read this one and submit the next, unless this one is the last.

    Returns the next cycle, None if it is not built ahead, or the error that prevented it; this cycle's tokens, cut
    after a stop token or at `left`; and whether they are the last.
    """
    try:
        ahead: Ahead = begin(d, cycle) if can_build_ahead(d, cycle) and not d.stopping else None  # the device is busy
    except KernelRefused as e:
        ahead = e
    built = ahead if isinstance(ahead, Flight) else None
    tokens, done = _cut(read(d, cycle, built), left, stop_tokens)
    done = done or d.stopping
    try:
        if built and not done:
            ahead = built = redraft(d, cycle, built)
            submit(d, cycle, built)
    except (*TROUBLE, GrammarError) as e:
        ahead, d.submitted.failed = e, isinstance(e, GraphFailed)
    return ahead, tokens, done


def _cut(tokens: list[int], left: int, stop_tokens: Collection[int]) -> tuple[list[int], bool]:
    """Return a cycle's tokens up to and with a stop token, at most `left`, and whether they are the last."""
    end = next((i for i, token in enumerate(tokens, 1) if token in stop_tokens or i == left), None)
    return tokens[:end], end is not None


def next_cycle(d: Decoder, cycle: Flight, ahead: Ahead) -> Flight:
    """Return the submitted cycle after this one: the one built ahead, or a new one if there is none or it failed.

    Raises GrammarError if the grammar cannot constrain it.
    """
    if isinstance(ahead, GrammarError):
        raise ahead
    if isinstance(ahead, TROUBLE):
        return _restart(d, ahead)
    try:
        return ahead or _submit_late(d, cycle)
    except TROUBLE as e:
        d.submitted.failed = isinstance(e, GraphFailed)
        return _restart(d, e)


def _restart(d: Decoder, error: Trouble) -> Flight:
    """Resume after an error by `disable_kernels`; return the submitted cycle whose tokens are yielded next.

    Repeats this for errors on the way; raises one that no kernel can have caused.
    """
    while True:
        try:
            first = resume(d, error)
            return _submit_late(d, first) if len(d.history.tokens) > first.base + 1 else first
        except TROUBLE as e:
            error, d.submitted.failed = e, isinstance(e, GraphFailed)


def _submit_late(d: Decoder, last: Flight) -> Flight:
    """Build and submit the cycle after `last`, whose tokens were yielded; first quantize caches that are due."""
    if last.late_reason:
        d.stats.built_late[last.late_reason] += 1
    position = last.base + last.accepted + 1
    d.cache.quantize_at(position)
    last.after.release()
    last.after = d.cache.mark()
    room = d.cache.room(position) - 1
    new = redraft(d, last, begin(d, last, room), room)
    new.late = True
    submit(d, last, new)
    return new
