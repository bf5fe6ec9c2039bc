"""Count the launches of a cycle of four greedy sequences with three drafts each, in a pool of four slots."""

from collections import Counter
from typing import Any
from unittest import mock

import mlx.core as mx

from mlx_mtp.cache.pool import Pool
from mlx_mtp.cache.slots import Span
from mlx_mtp.decoding.drafters import drafter_of
from mlx_mtp.decoding.drafters.drafter import Frame
from mlx_mtp.decoding.members import Single
from mlx_mtp.decoding.run import Run
from mlx_mtp.decoding.sampling import Picker
from mlx_mtp.decoding.step import step
from mlx_mtp.tuning.plan import Plan

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
            pool.resume_heads(texts)
            pool.live, plan = True, Plan(k=ROWS - 1)
            self.frame = Frame(model, pool, plan, drafter_of(model), [Single(Picker())] * TEXTS, ROWS)
            _, reached = step(self.frame, Run(*self.rows()), pool.unload())
        # Some layers share positions.
        blank = {id(part): mx.zeros_like(part) for parts in reached.parts for part in parts}
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
        run, arrays = step(self.frame, Run(*rows), self.arrays)
        return [run.packed, *(part for parts in arrays.parts for part in parts), *arrays.kept]


def of_texts(model: Any) -> Counter:
    """Return the launches of a cycle of all sequences, by primitive."""
    state = BatchState(model)
    return launches(state.cycle, state.rows)
