"""Store the tokens of a sequence that the host has read, and find earlier copies of the last ones.

Every position points to the newest earlier one at which the same n tokens end, for a few n (as in the match finder of
a compressor: Deutsch, "DEFLATE", RFC 1951, section 4). A token costs the same however long the sequence is.
"""

from collections.abc import Sequence

import numpy as np

from ..tuning.plan import SHORTEST

LONGEST = 32  # tokens of a match that are compared
RUNS = (24, 8, SHORTEST)  # lengths of the runs of tokens that are indexed
CANDIDATES = 32  # newest copies of a run that are compared
FACTOR = 0x9E3779B97F4A7C15  # base of the polynomial: odd, so no token's share becomes zero


class Copies:
    """For every position, the newest earlier one at which the same run of `length` tokens ends.

    A run is found by a number, a polynomial in its tokens modulo 2**64, so two runs may be confused:
    `TokenHistory.matches` compares the tokens themselves.
    """

    def __init__(self, length: int, tokens: np.ndarray):
        self.length, self._power = length, pow(FACTOR, length, 2**64)
        self._earlier, numbers = np.full(tokens.size, -1, np.int32), _numbers(tokens, length)
        order = np.argsort(numbers, kind="stable")
        same = np.flatnonzero(numbers[order][1:] == numbers[order][:-1])
        self._earlier[order[same + 1]] = order[same]
        self._newest = dict(zip(numbers.tolist(), range(tokens.size), strict=True))
        self._number = int(numbers[-1]) if tokens.size else 0

    def reserve(self, size: int) -> None:
        """Make room for `size` positions."""
        if size > self._earlier.size:
            self._earlier = np.concatenate([self._earlier, np.full(size, -1, np.int32)])

    def add(self, position: int, token: int, oldest: int) -> None:
        """Add a token; oldest: the one that leaves the run, `length` positions before it, 0 for none."""
        number = (self._number * FACTOR + token - oldest * self._power) & (2**64 - 1)
        self._earlier[position] = self._newest.get(number, -1)
        self._newest[number], self._number = position, number

    def before(self, position: int, count: int) -> list[int]:
        """Return up to `count` earlier ends of the run that ends at `position`, the newest first."""
        found: list[int] = []
        while len(found) < count and (position := int(self._earlier[position])) >= 0:
            found.append(position)
        return found


class TokenHistory:
    """The tokens of a sequence that the host has read, with a search for earlier copies of its end.

    A row of a picture has the id of the pictures' mark. The copies that are found contain no such row.
    """

    def __init__(self, tokens: Sequence[int] = (), exact: Sequence[int] = ()):
        """tokens: ids. exact: the same tokens as in `PromptCache.tokens`: negative in rows of pictures; or ()."""
        self._buffer, self._size = np.array(tokens, np.int32), len(tokens)
        self._exact = exact if exact is not tokens else ()
        self._pictures = np.array([token < 0 for token in self._exact])
        self._copies: list[Copies] = []  # from the first search on: plain decoding needs none

    @property
    def tokens(self) -> np.ndarray:
        """All tokens, int32 [N]."""
        return self._buffer[: self._size]

    def exact(self, size: int | None = None) -> list[int]:
        """Return the first `size` tokens, or all, as `PromptCache.tokens` has them: negative in rows of pictures."""
        known = self._exact[:size]
        return [*known, *self.tokens[len(known) : size].tolist()]

    def text_at(self, index: np.ndarray) -> np.ndarray:
        """Return the token ids at an array of indices, int32 of its shape; -1 for a row of a picture."""
        found, known = self._buffer[index], self._pictures.size
        if not known:
            return found
        return np.where((index < known) & self._pictures[np.minimum(index, known - 1)], np.int32(-1), found)

    def extend(self, tokens: list[int]) -> None:
        start, end = self._size, self._size + len(tokens)
        if end > self._buffer.size:
            self._buffer = np.concatenate([self.tokens, np.zeros(end, np.int32)])
        self._buffer[start:end] = tokens
        for copies in self._copies:
            copies.reserve(end)
            oldest = self._buffer[max(start - copies.length, 0) : max(end - copies.length, 0)].tolist()
            leaving = [0] * (len(tokens) - len(oldest)) + oldest
            for i, token in enumerate(tokens):
                copies.add(start + i, token, leaving[i])
        self._size = end

    def matched(self) -> int:
        """Return the length of the longest suffix that `matches` finds earlier: 0, or from SHORTEST to LONGEST."""
        return max((length for length, _ in self.matches(self._size)), default=0)

    def matches(self, size: int) -> list[tuple[int, int]]:
        """Return earlier copies of the end of the first `size` tokens: (length, index of the token after it) of each.

        The longest come first, of equal length the newest. Lengths are from SHORTEST to LONGEST; not every copy is
        found.
        """
        if not size:
            return []
        self._copies = self._copies or [Copies(length, self.tokens) for length in RUNS]
        ends = {end: None for copies in self._copies for end in copies.before(size - 1, CANDIDATES)}
        if not ends:
            return []
        after = np.fromiter(ends, np.int64, len(ends)) + 1
        last = self.text_at(np.arange(size)[: -LONGEST - 1 : -1])
        before = after[:, None] - np.arange(1, last.size + 1)
        same = (self.text_at(before) == last) & (before >= 0) & (last >= 0)
        lengths = np.logical_and.accumulate(same, axis=1).sum(axis=1)
        order = np.lexsort((-after, -lengths))
        return [(int(lengths[i]), int(after[i])) for i in order if lengths[i] >= SHORTEST]


def _numbers(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return the number of the run of `length` tokens that ends at each position, uint64 [N]; 0s precede all."""
    padded = np.concatenate([np.zeros(length - 1, np.uint64), tokens.astype(np.uint64)])
    numbers = np.zeros(tokens.size, np.uint64)
    for i in range(length):
        numbers = numbers * np.uint64(FACTOR) + padded[i : i + tokens.size]
    return numbers
