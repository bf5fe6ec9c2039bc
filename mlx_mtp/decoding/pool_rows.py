"""Combine and split the rows of runs when sequences join and leave a pool; round its number of slots."""

from functools import partial

import mlx.core as mx

from ..cache.pool import Pool
from ..cache.ring import CALL_ROWS
from ..cache.slots import gather
from .run import Run

MOST_MISSED = 8  # maximum rows that paused heads in a pool may miss: their rings take CALL_ROWS at once


def misses_too_many(pool: Pool, more: int) -> bool:
    """Return whether a drafter misses at least MOST_MISSED rows of a sequence, or over CALL_ROWS with `more`.

    more: number of rows to be read in addition.
    """
    return len(pool.missed) >= MOST_MISSED or len(pool.missed) + more > CALL_ROWS


def with_missed(pool: Pool, run: Run) -> Run:
    """Return a run with the rows that the drafter has not read, `pool.missed`, before its own; clear `missed`."""
    if not pool.missed:
        return run
    hidden, tokens = zip(*pool.missed, strict=True)
    accepted, pool.missed = run.last + len(hidden), []
    every = mx.concatenate([*hidden, run.hidden], axis=1), mx.concatenate([*tokens, run.tokens], axis=1)
    return Run(*every, accepted)


def merged(run: Run | None, firsts: list[Run], index: mx.array) -> Run:
    """Return the run of old and new sequences in the order of `index`, int32 [m].

    run: of the old sequences, None without any. firsts: the new sequences' runs of one row, which are padded to
    `run.size` rows. With n sequences in `run`, free slots included, indices below n select these, and n + i selects
    item i of `firsts`.
    """
    size = run.size if run else 1
    wide = partial(mx.pad, pad_width=[(0, 0), (0, size - 1)])
    hidden = [mx.pad(first.hidden, [(0, 0), (0, size - 1), (0, 0)]) for first in firsts]
    tokens = [wide(first.tokens) for first in firsts]
    accepted = [mx.zeros(1, mx.int32) for _ in firsts]
    old = (run.hidden, run.tokens, run.last) if run else (None, None, None)
    rows, chosen, last = (gather(a, b, index) for a, b in zip(old, (hidden, tokens, accepted), strict=True))
    return Run(rows, chosen, last)


def slots_for(sequences: int) -> int:
    """Return a number of slots rounded up to one that cycles are recorded for: 1, 2, 3, 4, 6, 8, 12, 16 ..."""
    power = 1 << (sequences - 1).bit_length()
    return power * 3 // 4 if power > 2 and sequences <= power * 3 // 4 else power
