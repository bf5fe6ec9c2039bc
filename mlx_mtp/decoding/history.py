"""Keep the tokens of a sequence that the host has read, and find earlier copies of the last ones."""

from collections.abc import Sequence

import numpy as np

from ..tuning.plan import SHORTEST

LONGEST = 8  # maximum length of a match, in tokens
WIDTH = 21  # bits per token in the key of a run of tokens
CANDIDATES = 64  # number of earlier occurrences, the newest, whose match length is computed


class TokenHistory:
    """The tokens of a sequence that the host has read, searchable for repetitions."""

    def __init__(self, tokens: Sequence[int] = ()):
        self._buffer, self._size = np.array(tokens, np.int32), len(tokens)
        self._runs = _runs(self._buffer)

    @property
    def tokens(self) -> np.ndarray:
        """All tokens, int32 [N]."""
        return self._buffer[: self._size]

    def extend(self, tokens: list[int]) -> None:
        start, end = self._size, self._size + len(tokens)
        if end > self._buffer.size:
            self._buffer = np.concatenate([self.tokens, np.zeros(end, np.int32)])
            self._runs = np.concatenate([self._runs[:start], np.zeros(end, np.int64)])
        self._buffer[start:end] = tokens
        run = int(self._runs[start - 1]) if start else 0
        for i, token in enumerate(tokens, start):
            self._runs[i] = run = (run >> WIDTH) | token << (SHORTEST - 1) * WIDTH
        self._size = end

    def matched(self) -> int:
        """Return the length of the longest suffix that also occurs earlier: 0, or SHORTEST to LONGEST tokens."""
        if self._size <= SHORTEST:
            return 0
        runs = self._runs[SHORTEST - 1 : self._size]
        ends = np.flatnonzero(runs[:-1] == runs[-1])[-CANDIDATES:] + SHORTEST
        if not ends.size:
            return 0
        last = self.tokens[: -LONGEST - 1 : -1]
        before = ends[:, None] - np.arange(1, last.size + 1)
        same = (self.tokens[before] == last) & (before >= 0)
        return int(np.logical_and.accumulate(same, axis=1).sum(axis=1).max())


def _runs(tokens: np.ndarray) -> np.ndarray:
    """Return at each position a key of the last SHORTEST tokens, int64 [N]; no vocabulary has 2**WIDTH tokens."""
    padded = np.concatenate([np.zeros(SHORTEST - 1, np.int64), tokens])
    return sum((padded[i : i + tokens.size] << WIDTH * i for i in range(SHORTEST)), np.zeros(tokens.size, np.int64))
