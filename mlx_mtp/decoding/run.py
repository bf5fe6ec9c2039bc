"""Hold the arrays that one step passes to the next: verified rows of n sequences, and drafts."""

from typing import Any, NamedTuple

import mlx.core as mx

from .rows_read import RowsRead, nodes_of

# A value, not an operation: the stream of an operation would be that of the importing thread.
NONE_ACCEPTED = mx.array([0], mx.int32)


class Run(NamedTuple):
    """The rows that the target has verified, R of each of n sequences, as arrays.

    hidden:   [n, R, H] the target's hidden rows, row r at position base + r; None in a step without a drafter.
    tokens:   [n, R] int32, the target's own token after each row.
    accepted: int32 [n], number of accepted drafts: rows 0..accepted are kept, tokens[accepted] is the newest token.
              -1 for a free slot. None in the input of a step if R is 1.
    drafts:   [n, R-1] int32, the verified drafts; None if there were none.
    packed:   what the host reads: `tokens`, and unless `drafts` is None one more column, `accepted`; then `nodes`.
    logprobs: [R, V] of each sequence that requested them, for the host.
    path:     after a tree, int32 [n, R]: the numbers that these rows, the accepted path, had among its rows.
    nodes:    after a tree, int32 [n, 3 * (T-1)]: of each draft whether the path to it was right, its depth from 1 on,
              and the bits of the path's float32 probability by the drafter.
    """

    hidden: Any
    tokens: mx.array
    accepted: Any
    drafts: mx.array | None = None
    packed: Any = None
    logprobs: tuple[mx.array | None, ...] | None = None
    path: mx.array | None = None
    nodes: mx.array | None = None

    @classmethod
    def of(cls, hidden: mx.array, tokens: mx.array, accepted: mx.array, drafts: Any, logprobs: Any) -> "Run":
        packed = tokens if drafts is None else mx.concatenate([tokens, accepted[:, None]], axis=1)
        return cls(hidden, tokens, accepted, drafts, packed, logprobs)

    @classmethod
    def of_row(cls, row: mx.array, token: int) -> "Run":
        """Return the run of one sequence whose only row, [1, 1, H], chose `token`, which the host has read."""
        return cls.of(row, mx.array([[token]], mx.int32), NONE_ACCEPTED, None, None)

    @property
    def size(self) -> int:
        """Number of verified rows of each sequence, R."""
        return self.tokens.shape[1]

    @property
    def verified(self) -> int:
        """Number of verified drafts of each sequence; of a tree also those that are not on the path."""
        return self.size - 1 if self.nodes is None else self.nodes.shape[1] // 3

    @property
    def given(self) -> "Run":
        """The input of the next step: hidden rows, tokens and, if R > 1, the accepted counts."""
        return Run(self.hidden, self.tokens, self.accepted if self.size > 1 else None)

    @property
    def last(self) -> mx.array:
        """The index of each sequence's last accepted row, int32 [n]."""
        if self.accepted is not None:
            return self.accepted
        n = self.tokens.shape[0]
        return NONE_ACCEPTED if n == 1 else mx.zeros(n, mx.int32)

    def newest(self) -> mx.array:
        """Return each sequence's newest token, which the target has not read yet, int32 [n, 1]."""
        return rows_at(self.tokens, self.last) if self.size > 1 else self.tokens

    def logprobs_of(self, row: int, sequence: int = 0) -> mx.array | None:
        """Return the logprobs [V] of a sequence's row; None if they were not requested."""
        if self.logprobs is None or (found := self.logprobs[sequence]) is None:
            return None
        mx.async_eval(logprobs := found[row])  # evaluated here: the caller's thread does not hold the turn
        return logprobs

    def read(self) -> list[RowsRead]:
        """Wait for the run; return what each sequence got."""
        values: Any = self.packed.tolist()
        if self.drafts is None:
            return [RowsRead(row, 0) for row in values]
        if self.nodes is not None:
            return [
                RowsRead(row[: row[self.size] + 1], row[self.size], nodes_of(row[self.size + 1 :])) for row in values
            ]
        return [RowsRead(row[: row[-1] + 1], row[-1]) for row in values]


class Drafts(NamedTuple):
    """k drafted tokens of each sequence.

    tokens:     [n, k] int32; None for no drafts.
    confidence: [n, k] float32, the drafter's probability of each token at temperature 1; None if not requested.
    each:       the same tokens per depth, [n, 1] each; () if they are not made one after the other.
    parents:    of a tree, int32 [n, k]: the row that each draft continues, 0 for the newest token and i for draft
                i - 1, an earlier one; None for a chain. `confidence` is then that of the whole path to each draft.
    levels:     maximum drafts on a path of a tree.
    """

    tokens: mx.array | None = None
    confidence: mx.array | None = None
    each: tuple[mx.array, ...] = ()
    parents: mx.array | None = None
    levels: int = 0

    @property
    def k(self) -> int:
        return 0 if self.tokens is None else self.tokens.shape[1]

    def sure(self, p_min: float) -> int:
        """Wait for the confidence; return the greatest number, of any sequence, of drafts before one below p_min."""
        assert self.parents is None, "the confidence of a tree is that of paths"
        values: Any = self.confidence.tolist()  # type: ignore[union-attr] - it was requested
        return max(next((i for i, value in enumerate(row) if value < p_min), len(row)) for row in values)

    def first(self, k: int) -> "Drafts":
        """Return the first k drafts of each sequence without their confidence, NO_DRAFTS for k = 0."""
        return NO_DRAFTS if self.tokens is None or k == 0 else Drafts(self.tokens[:, :k])


NO_DRAFTS = Drafts()


def rows_at(x: mx.array, index: mx.array) -> mx.array:
    """Return each sequence's row of x [n, R, ...] at its own index, int32 [n]: [n, 1, ...]."""
    if x.shape[1] == 1:
        return x
    if x.shape[0] == 1:
        return mx.take(x, index, axis=1)
    return mx.take_along_axis(x, index.reshape(-1, *[1] * (x.ndim - 1)), axis=1)
