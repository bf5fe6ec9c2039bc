"""Bring the caches of a generation to rest at the last yielded token, and resume there after a failed graph."""

from functools import partial

from ..tuning.kernel_fallback import Trouble
from .consent import disable_kernels
from .cycle import Decoder, Flight, submit_first
from .prefill import first_run, read_again
from .run import Run


def resume(d: Decoder, error: Trouble) -> Flight:
    """Continue after an error: call `disable_kernels`; return a first `Flight` after the last yielded token.

    The flight's token is the last yielded one, which must not be yielded again; if none was yielded, it is the first
    generated token, which is still to be yielded. Raises as `disable_kernels` if no kernel can have caused the error.
    """
    try:
        disable_kernels(d, error)
    except Exception:
        d.submitted.failed = False  # the error ends the generation: `settle` must not prefill again
        raise
    settle(d)
    if len(d.history.tokens) <= d.emitting.base + d.emitted:
        return submit_first(d, partial(first_run, d.model, d.cache, d.emitting.run.hidden, d.picker))
    row = last_row(d)
    first = submit_first(d, lambda: row)
    d.history.extend(row.read()[0][0])
    d.clock.restart()
    return first


def last_row(d: Decoder) -> Run:
    """Return the run of the row that chose the last yielded token, without computing; the caches must be at rest."""
    row, token = d.emitting.run.hidden[:, d.emitted - 1 : d.emitted], d.history.tokens[d.emitting.base + d.emitted]
    return Run.of_row(row, int(token))


def settle(d: Decoder) -> None:
    """Bring the caches to rest: they then contain every token but the last one yielded.

    After a stop token the emitting cycle N was submitted last; if the consumer has closed it, as a rule N+1 was.

    1. Restore the arrays after the cycle submitted last. A cycle that was only built is dropped.
    2. Return the recurrent states and what the heads have read to `end`, the mark after N. That is N+1's `before`, or
       N's own `after` if N was submitted last. Keys and values of N+1 stay in the buffers, to be overwritten.
    3. Lower the positions to the last yielded token. If a failed graph has lost the arrays, prefill all tokens again.
    """
    cache, emitting, submitted = d.cache, d.emitting, d.submitted
    if submitted.failed:
        submitted.after = submitted.before
    lost = submitted.failed and submitted.after.caches is None
    end = emitting.after if emitting is submitted else submitted.before
    cache.restore(submitted.after)
    end.release()  # its arrays are restored above or outdated, and would make the next write a copy
    cache.restore(end)
    if d.emitted:
        cache.push(emitting.run.hidden[:, : d.emitted])
    else:  # no token of this cycle was yielded, so that its first row is rolled back too
        cache.restore_states(emitting.before)
    cache.settle(d.history.exact(emitting.base + d.emitted))
    if lost:
        read_again(d.model, cache, heads=d.k > 0, chunk=d.chunk)
