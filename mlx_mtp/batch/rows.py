"""Put rows of runs together and apart where texts join and leave a pool, and choose how many slots it has."""

from functools import partial

import mlx.core as mx

from ..cache.pool import Pool
from ..cache.slots import gather
from ..decoding.run import Run


def with_missed(pool: Pool, run: Run) -> Run:
    """Put the rows that the drafter has missed in front of a run's."""
    if not pool.missed:
        return run
    hidden, tokens = zip(*pool.missed, strict=True)
    accepted, pool.missed = run.last + len(hidden), []
    every = mx.concatenate([*hidden, run.hidden], axis=1), mx.concatenate([*tokens, run.tokens], axis=1)
    return Run(*every, accepted)


def row_of(run: Run, row: int, index: int, token: int) -> Run:
    """Cut out of a run the one row [1, 1, H] of a text that has chosen this token."""
    return Run.of_row(run.hidden[row : row + 1, index : index + 1], token)


def merged(run: Run | None, firsts: list[Run], index: mx.array) -> Run:
    """Put the rows of a run and of newcomers' first ones, all of as many rows, in the order of an index."""
    size = run.size if run else 1
    wide = partial(mx.pad, pad_width=[(0, 0), (0, size - 1)])
    hidden = [mx.pad(first.hidden, [(0, 0), (0, size - 1), (0, 0)]) for first in firsts]
    tokens = [wide(first.tokens) for first in firsts]
    accepted = [mx.zeros(1, mx.int32) for _ in firsts]
    old = (run.hidden, run.tokens, run.last) if run else (None, None, None)
    found = [gather(a, b, index) for a, b in zip(old, (hidden, tokens, accepted), strict=True)]
    return Run(found[0], found[1], found[2])


def slots_for(texts: int) -> int:
    """Round a number of slots up to the bucket that its cycles are recorded for: 1, 2, 3, 4, 6, 8, 12, 16 ..."""
    power = 1 << (texts - 1).bit_length()
    return power * 3 // 4 if power > 2 and texts <= power * 3 // 4 else power
