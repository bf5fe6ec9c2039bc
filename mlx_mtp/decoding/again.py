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

Keeping = Rows[tuple[Sequence | None, int]]  # of each row of a pass: its sequence, and the number of rows to keep


def why_read_again(cache: StepCache, verified: int) -> str | None:
    """Return why the cycle after one of `verified` rows cannot be built before that is read; None if it can."""
    return "states that cannot step back" if verified > 1 and any(c.rereads for c in cache.layers) else None


def read_kept(model: Target, cache: StepCache, kept: Keeping, verified: int) -> bool:
    """Let states contain only the rows to keep of `verified` rows from each `Sequence.base` on.

    Returns whether a pass read rows again: one per number of rows to keep below `verified`. Nothing happens to states
    that do not contain rejected rows any more. After an error, as KernelRefused, the cache is as it was.
    """
    states: list[Any] = [c for c in cache.layers if c.rereads and c.undoes]
    short = sorted({n for sequence, n in kept if sequence and n < verified}) if states else []
    if not short:
        return False
    mark, before, counts = cache.mark(), [c.oldest for c in states], mx.array([n for _, n in kept])
    bases = [sequence.base if sequence else 0 for sequence, _ in kept]
    pooled = isinstance(cache, Pool)
    place: Any = mx.array(bases) if pooled else bases[0]
    try:
        for n in short:
            after = [c.newest for c in states]
            for c, arrays in zip(states, before, strict=True):
                c.parts = arrays
            seek(cache.layers, place, max(bases))
            if n:
                model.hidden(mx.array([_tokens(sequence, n) for sequence, _ in kept]), cache.layers)
            for c, arrays in zip(states, after, strict=True) if pooled else ():
                c.choose(counts == n, arrays)
        seek(cache.layers, place + (counts if pooled else short[0]), max(bases) + verified)
        run_first(model)
    except BaseException:
        cache.restore(mark)
        raise
    return any(short)


def come_to_rest(model: Target, cache: PromptCache, sequence: Sequence, n: int, verified: int) -> None:
    """Call `read_kept` for a sequence's own cache, which keeps n rows; without kernels that are refused."""
    without_refused(model, read_kept, model, cache, [(sequence, n)], verified)


def _tokens(sequence: Sequence | None, n: int) -> list[int]:
    """Return the n tokens of a sequence from its `base` on, with zeros after its end; without one only zeros."""
    tokens = sequence.history.tokens[sequence.base : sequence.base + n].tolist() if sequence else []
    return tokens + [0] * (n - len(tokens))
