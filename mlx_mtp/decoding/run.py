"""Hold what one step hands to the next: the rows of n sequences that the target has verified, and drafts for more."""

from typing import Any, NamedTuple

import mlx.core as mx

NONE_ACCEPTED = mx.array(
    [0], mx.int32
)  # a value, not an operation, whose stream would be that of the importing thread


class Run(NamedTuple):
    """Rows that the target has verified, of n sequences, R of each; all of it arrays.

    hidden:   [n, R, H] the target's hidden rows; row r of a sequence is its position base + r.
    tokens:   [n, R] int32, the target's own token after each row.
    accepted: int32 [n]; rows 0..accepted are right, tokens[accepted] is the newest token. -1 in a row that is no
              sequence's. None, of a run that the next step gets, where R is 1.
    drafts:   [n, R-1] int32, what was verified, None for none; packed: tokens and, behind drafts, accepted. These and
              logprobs, [R, V] of each sequence that asks for them, are for the host.
    """

    hidden: mx.array
    tokens: mx.array
    accepted: Any
    drafts: mx.array | None = None
    packed: Any = None
    logprobs: tuple[mx.array | None, ...] | None = None

    @classmethod
    def of(cls, hidden: mx.array, tokens: mx.array, accepted: mx.array, drafts: Any, logprobs: Any) -> "Run":
        packed = tokens if drafts is None else mx.concatenate([tokens, accepted[:, None]], axis=1)
        return cls(hidden, tokens, accepted, drafts, packed, logprobs)

    @classmethod
    def of_row(cls, row: mx.array, token: int) -> "Run":
        """Make the run of one sequence whose only row, [1, 1, H], has chosen a token that the host knows."""
        return cls.of(row, mx.array([[token]], mx.int32), NONE_ACCEPTED, None, None)

    @property
    def size(self) -> int:
        """Rows of a sequence that were verified."""
        return self.tokens.shape[1]

    @property
    def given(self) -> "Run":
        """What the next step gets; no constant, which `mx.compile` does not allow among inputs."""
        return Run(self.hidden, self.tokens, self.accepted if self.size > 1 else None)

    @property
    def last(self) -> mx.array:
        """The last right row of each sequence, int32 [n]."""
        if self.accepted is not None:
            return self.accepted
        n = self.tokens.shape[0]
        return NONE_ACCEPTED if n == 1 else mx.zeros(n, mx.int32)

    def newest(self) -> mx.array:
        """Return the token of each sequence that the target has not read yet, int32 [n, 1]."""
        return rows_at(self.tokens, self.last) if self.size > 1 else self.tokens

    def logprobs_of(self, row: int, sequence: int = 0) -> mx.array | None:
        """Return the logprobs [V] of a sequence's row, None where nobody asked for them."""
        if self.logprobs is None or (found := self.logprobs[sequence]) is None:
            return None
        mx.async_eval(logprobs := found[row])  # now, in this turn: the caller has none
        return logprobs

    def read(self) -> list[tuple[list[int], int]]:
        """Wait for the run; return the right tokens of each sequence, and how many of them are drafts."""
        values: Any = self.packed.tolist()
        if self.drafts is None:
            return [(row, 0) for row in values]
        return [(row[: row[-1] + 1], row[-1]) for row in values]


class Drafts(NamedTuple):
    """k drafted tokens of each sequence.

    tokens:     [n, k] int32, None for no drafts.
    confidence: [n, k] float32, the drafter's probability of each token at temperature 1; None where not asked for.
    """

    tokens: mx.array | None = None
    confidence: mx.array | None = None

    @property
    def k(self) -> int:
        return 0 if self.tokens is None else self.tokens.shape[1]

    def sure(self, least: float) -> int:
        """Wait for the confidence; count the leading drafts that are at least so sure, of the surest sequence."""
        values: Any = self.confidence.tolist()  # type: ignore[union-attr] - it was asked for
        return max(next((i for i, value in enumerate(row) if value < least), len(row)) for row in values)

    def first(self, k: int) -> "Drafts":
        """Keep the first k drafts of each sequence."""
        return NO_DRAFTS if self.tokens is None or k == 0 else Drafts(self.tokens[:, :k])


NO_DRAFTS = Drafts()


def rows_at(x: mx.array, index: mx.array) -> mx.array:
    """Take each sequence's row at its own index, int32 [n], of x [n, R, ...]: [n, 1, ...]."""
    if x.shape[1] == 1:
        return x
    if x.shape[0] == 1:
        return mx.take(x, index, axis=1)
    return mx.take_along_axis(x, index.reshape(-1, *[1] * (x.ndim - 1)), axis=1)
