"""Count the launches of a cycle of four greedy sequences with three drafts each, in a pool of four slots."""

from collections import Counter
from typing import Any
from unittest import mock

import mlx.core as mx

from mlx_mtp.batch.pool import Pool
from mlx_mtp.batch.replay import Chosen
from mlx_mtp.batch.step import Frame, Run, step
from mlx_mtp.cache.slots import Span
from mlx_mtp.decoding.sampling import Picker

from .graph import launches
from .models import WIDTH
from .steps import at_rest

TEXTS, ROWS = 4, 4
MOST = 1.6  # maximum launches relative to the cycle of one sequence


class BatchState:
    """A pool of greedy sequences after a prompt and a cycle, from which any number of cycles can be counted."""

    def __init__(self, model: Any):
        with mock.patch.object(mx, "eval"):  # only the shapes of the caches are used
            cache = at_rest(model, ROWS)
            pool, texts = Pool(cache), [(slot, cache.copy()) for slot in range(TEXTS)]
            pool.regroup(Span(range(TEXTS), TEXTS), range(TEXTS), texts)
            pool.wake(texts)
            self.frame = Frame(model, pool, ROWS - 1, [Chosen(Picker(), True)] * TEXTS, True, ROWS)
            _, reached = step(self.frame, Run(*self.rows()), pool.unload(heads=True), None)
        blank = {
            id(part): mx.zeros_like(part) for parts in reached.parts for part in parts
        }  # some layers share positions
        parts, kept = [tuple(blank[id(part)] for part in each) for each in reached.parts], reached.kept
        ends = mx.full(TEXTS, ROWS), mx.full(TEXTS, ROWS)
        self.arrays = reached._replace(ends=ends, parts=parts, kept=[mx.zeros_like(each) for each in kept])
        mx.eval(self.arrays)

    def rows(self) -> list[mx.array]:
        """Return the rows of a previous run."""
        shape = TEXTS, ROWS
        arrays = [mx.zeros((*shape, WIDTH), mx.bfloat16), mx.zeros(shape, mx.int32), mx.zeros(TEXTS, mx.int32)]
        mx.eval(arrays)
        return arrays

    def cycle(self, *rows: mx.array) -> list[mx.array]:
        """Return all arrays that the next cycle computes."""
        run, arrays = step(self.frame, Run(*rows), self.arrays, None)
        return [run.packed, *(part for parts in arrays.parts for part in parts), *arrays.kept]


def of_texts(model: Any) -> Counter:
    """Return the launches of a cycle of all sequences, by primitive."""
    state = BatchState(model)
    return launches(state.cycle, state.rows)
