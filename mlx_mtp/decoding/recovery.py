"""Bring the caches of a generation to rest, and go on behind the tokens that were shown where a graph has failed."""

from functools import partial

from ..tuning.kernel_fallback import Trouble
from .cycle import Decoder, Flight, follow, give_way
from .prefill import first_run, read_again
from .run import Run


def resume(d: Decoder, error: Trouble) -> Flight:
    """Go on behind the tokens that were shown, without the kernels to blame for an error; return the first cycle.

    Its token has been shown, unless it is a prompt's first one.
    """
    try:
        give_way(d, error)
    except Exception:
        d.newest.failed = False  # the error ends the answer, and nothing is read again
        raise
    settle(d)
    known = len(d.text.tokens) > d.shown.base + d.rows
    if not known:
        return follow(d, partial(first_run, d.model, d.cache, d.shown.run.hidden, d.picker))
    row = newest_row(d)
    first = follow(d, lambda: row)
    d.text.extend(row.read()[0][0])
    d.clock.restart()
    return first


def newest_row(d: Decoder) -> Run:
    """Return the row that has chosen the token shown last, of a text that has been brought to rest."""
    row, token = d.shown.run.hidden[:, d.rows - 1 : d.rows], d.text.tokens[d.shown.base + d.rows]
    return Run.of_row(row, int(token))


def settle(d: Decoder) -> None:
    """Bring the caches to rest: drop a cycle that was not submitted, take back rows that were not shown."""
    cache, shown, newest = d.cache, d.shown, d.newest
    if newest.failed:
        newest.after = newest.before
    lost = newest.failed and newest.after.caches is None
    rest = shown.after if shown is newest else newest.before
    cache.restore(newest.after)  # keys and values as the device has them: a cycle after it was only built
    rest.release()  # of the moment behind the tokens shown: states alone, rows that came later stay and are covered
    cache.restore(rest)
    if d.rows:
        cache.push(shown.run.hidden[:, : d.rows])
    else:  # a plain row that was read comes out of the states again
        cache.restore_states(shown.before)
    cache.settle(d.text.tokens[: shown.base + d.rows].tolist())
    if lost:
        read_again(d.model, cache, heads=d.k > 0, step=d.chunk)
