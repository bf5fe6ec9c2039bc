"""Judge which greedy choices of a text rounding could have changed, from one forward pass of the target.

Two tokens are a near-tie if their logits differ by less than the rounding error. A lower bound follows from the
dtype.
Each of the 2 x layers sums of the residual stream is rounded; errors that add up at random move a logit by about
sqrt(2 x layers) units of its row's spread, and the logit itself is rounded by one unit of its size. If a router may
choose another expert the error is much larger. It is measured there as in Monte Carlo arithmetic (Parker 1997): the
pass is repeated with the embeddings changed in their last place, which changes all later roundings.
"""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..cache.make_cache import make_prompt_cache
from ..decoding.prefill import read_chunk
from ..pictures.rows import Picture

CHUNK = 512  # tokens per call
ROWS = 16  # maximum rows whose logits are held at a time
UNITS = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}  # of rounding to nearest
FLOOR = 3.0  # times the estimate in the docstring above; on the demo the estimate was off by at most 1.5
PASSES = 8  # repeated passes with other roundings
REACH = 2.0  # times the maximum change of a gap: in 2,800 positions of six 16-bit models no change was greater


class Judgement(NamedTuple):
    """Two tokens' logits, the distance `gap` from the lower one to the row's maximum, and the tolerance of that gap.

    The gap includes the noise of a sampled token, the logits do not.
    """

    logits: tuple[float, float]
    gap: float
    tolerance: float


class OnePass:
    """A text of L tokens and its `hidden` rows [1, L, H] from empty caches, in the model's `dtype`.

    pictures: those among the tokens, in which each row of a picture is a negative number.
    """

    def __init__(self, model: Any, tokens: list[int], pictures: Sequence[Picture] = ()):
        self.model, self.tokens, self._pictures = model, tokens, pictures
        self.hidden = _read(model, tokens, pictures)
        self.dtype = self.hidden.dtype

    def logits(self, position: int) -> np.ndarray:
        """Return the logits, float32 [V], from which the token at `position` >= 1 is chosen."""
        return _logits(self.model, self.hidden, position)

    @cached_property
    def predicted(self) -> list[int]:
        """The greedy token after each of the L tokens."""
        return greedy(self.model.logits, self.hidden).tolist()  # type: ignore[return-value]

    def floor(self, position: int) -> float:
        """Return FLOOR times the estimated rounding error of a difference of two logits of the token at a position.

        The estimate assumes that no router chooses another expert because of rounding.
        """
        row = self.logits(position)
        unit = UNITS[self.dtype]
        if self.dtype == mx.float32:  # sums of products are rounded in float32, too
            unit *= math.sqrt(self.hidden.shape[-1])
        return FLOOR * unit * float(math.sqrt(2 * len(self.model.layers)) * row.std() + np.abs(row).max())

    def reach(self, position: int) -> float:
        """Return REACH times the greatest change of a logprob at a position in passes with other roundings.

        At least `floor`.
        """
        row = _logprobs(self.logits(position))
        moved = max(float(np.abs(_logprobs(other) - row).max()) for other in self._others(position))
        return max(self.floor(position), REACH * moved)

    def judge(self, position: int, tokens: tuple[int, int], noise: np.ndarray | float = 0.0) -> Judgement:
        """Return the judgement on two tokens at a position >= 1 of the text, given logits plus `noise` [V].

        The tolerance is `floor`; if the gap is greater or NaN, it is REACH times the greatest change of the gap in
        passes with other roundings, at least `floor`.
        """
        row = self.logits(position)
        scores = row + noise
        places = [int(scores.argmax()), *tokens]
        gap = float(scores.max() - scores[places].min())
        tolerance = self.floor(position)
        if not gap <= tolerance:
            changes = [other[places] - row[places] for other in self._others(position)]
            tolerance = max(tolerance, REACH * max(float(np.ptp(change)) for change in changes))
        return Judgement((float(row[tokens[0]]), float(row[tokens[1]])), gap, tolerance)

    def _others(self, position: int) -> Iterator[np.ndarray]:
        """Yield the logits [V] of the token at `position` after each of PASSES passes over the text before it.

        Each pass has other roundings.
        """
        for seed in range(PASSES):
            with _other_roundings(_embedding_of(self.model), seed):
                hidden = _read(self.model, self.tokens[:position], self._pictures)
            yield _logits(self.model, hidden, position)


def greedy(logits: Callable[[mx.array], mx.array], hidden: mx.array) -> mx.array:
    """Return the greedy tokens [L] of rows [1, L, H], computed and evaluated ROWS rows at a time.

    logits: returns the logits [1, rows, V] of rows.
    """
    parts = []
    for i in range(0, hidden.shape[1], ROWS):
        parts.append(mx.argmax(logits(hidden[:, i : i + ROWS])[0], axis=-1))
        mx.eval(parts[-1])
    return mx.concatenate(parts)


def _logits(model: Any, hidden: mx.array, position: int) -> np.ndarray:
    return np.array(model.logits(hidden[:, position - 1 : position])[0, 0].astype(mx.float32))


def _logprobs(row: np.ndarray) -> np.ndarray:
    return row - np.logaddexp.reduce(row.astype(np.float64))


def _read(model: Any, tokens: list[int], pictures: Sequence[Picture] = ()) -> mx.array:
    cache, rows = make_prompt_cache(model, num_draft_tokens=0), []
    if pictures:
        cache.name_pictures(pictures)
        while rest := tokens[cache.offset : cache.offset + CHUNK]:
            rows.append(read_chunk(model, cache, rest, heads=False, chunk=CHUNK)[0])
        return mx.concatenate(rows, axis=1)
    for start in range(0, len(tokens), CHUNK):
        rows.append(model.hidden(mx.array(tokens[start : start + CHUNK])[None], cache.layers))
        mx.eval(rows[-1], cache.arrays)
    return mx.concatenate(rows, axis=1)


def _embedding_of(model: Any) -> nn.Module:
    """Return the module that embeds a target's tokens; without a port it is the first embedding of its size."""
    if isinstance(embedding := getattr(model, "embedding", None), nn.Module):
        return embedding
    return next(m for m in model.modules() if hasattr(m, "as_linear") and m.weight.shape[0] >= model.vocab_size)


@contextmanager
def _other_roundings(embedding: Any, seed: int) -> Generator[None, None, None]:
    """Change an embedding's output in its last place at random inside the block, seeded by `seed`.

    The module's class is replaced for that time.
    """
    kind = type(embedding)

    def changed(self: Any, tokens: mx.array) -> mx.array:
        rows = kind.__call__(self, tokens)
        noise = mx.random.uniform(-1, 1, rows.shape, key=mx.random.key(seed))
        return (rows.astype(mx.float32) * (1 + 2 * UNITS[rows.dtype] * noise)).astype(rows.dtype)

    embedding.__class__ = type(kind.__name__, (kind,), {"__call__": changed})
    try:
        yield
    finally:
        embedding.__class__ = kind
