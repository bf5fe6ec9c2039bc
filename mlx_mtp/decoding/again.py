"""Read the accepted rows of a verify again into states that cannot be rolled back (`StateCache`)."""

from collections.abc import Sequence as Rows
from typing import Any

import mlx.core as mx

from ..cache.pool import Pool
from ..cache.prompt_cache import PromptCache
from ..cache.step_cache import StepCache, seek
from ..layers.target import Target
from ..tuning.kernel_fallback import run_first
from .prefill import without_refused
from .sequence import Sequence

KeptRows = tuple[int, list[int]]  # position of a pass's first row in a sequence, and the tokens of its rows to keep


def why_read_again(cache: StepCache, verified: int) -> str | None:
    """Return why the cycle after one of `verified` rows cannot be built before that is read; None if it can."""
    return "states that cannot step back" if verified > 1 and any(c.rereads for c in cache.layers) else None


def read_kept(model: Target, cache: StepCache, kept: Rows[KeptRows | None], verified: int) -> bool:
    """Let states contain only the rows to keep of `verified` rows; return whether a pass read rows again.

    kept: of each row of the pass, None if its sequence is not needed. There is one pass per number of rows to keep
    below `verified`. Nothing happens to states that do not contain rejected rows any more. After an error, as
    KernelRefused, the cache is as it was.
    """
    states: list[Any] = [c for c in cache.layers if c.rereads and len(c.parts) > c.count]
    short = sorted({len(k[1]) for k in kept if k and len(k[1]) < verified}) if states else []
    if not short:
        return False
    mark, before, pooled = cache.mark(), [c.parts[: c.count] for c in states], isinstance(cache, Pool)
    bases, tokens = zip(*(k or (0, []) for k in kept), strict=True)
    counts, place = mx.array([*map(len, tokens)]), mx.array(bases) if pooled else bases[0]
    try:
        for n in short:
            after = [c.newest for c in states]
            for c, arrays in zip(states, before, strict=True):
                c.parts = arrays
            seek(cache.layers, place, max(bases))
            if n:
                model.hidden(mx.array([(each + [0] * n)[:n] for each in tokens]), cache.layers)
            for c, arrays in zip(states, after, strict=True) if pooled else ():
                c.choose(counts == n, arrays)
        seek(cache.layers, place + (counts if pooled else short[0]), max(bases) + verified)
        run_first(model)
    except BaseException:
        cache.restore(mark)
        raise
    return any(short)


def come_to_rest(model: Target, cache: PromptCache, kept: KeptRows, verified: int) -> None:
    """Call `read_kept` for a sequence's own cache, without kernels that are refused."""
    without_refused(model, read_kept, model, cache, [kept], verified)


def first_rows(sequence: Sequence, n: int | None = None) -> KeptRows:
    """Return the first n rows of a sequence's newest pass, or the accepted ones, as rows to keep."""
    base, end = sequence.base, sequence.next_base if n is None else sequence.base + n
    return base, sequence.history.tokens[base:end].tolist()
