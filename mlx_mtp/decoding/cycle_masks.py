"""Write the masks of a cycle: of its rows, and of the drafts that a drafter makes within the step.

The graphs of a cycle are built before the previous cycle is read, but masks depend on that cycle's tokens, and on the
drafts. So masks are arrays that the graphs have as inputs, and whose memory the host writes later, before the graph
that reads them is submitted. The first draft's mask, and those of tokens that the grammar forces, need no draft to
be read.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from itertools import takewhile
from operator import eq

import mlx.core as mx
import numpy as np

from ..grammar import GrammarError
from .masks import Masks
from .members import Member, Members


def mask_thread() -> Executor:
    """Return an executor of one thread, in which `submit_pass` writes masks of one decoding loop.

    The thread starts with the first masks, and ends at `shutdown` or when the executor is garbage-collected. On
    Linux it saves more than the overlap: llguidance's allocations are then apart from those of MLX's graphs, which
    the C library otherwise merges at each of them.
    """
    return ThreadPoolExecutor(1, "mlx-mtp-masks")


class CycleMasks:
    """The masks of a cycle with k drafts per sequence, of which one or more have a grammar.

    tree:    the drafts are a tree's, else a chain.
    rows:    int32 [n, k + 1, words]: the tokens that may be chosen in each row, all of them without a grammar.
    allowed: int32 [k, n, words]: the tokens that may be drafted, an input of the drafter's graph; None if no drafter
             in the step makes the drafts.
    forced:  per sequence, the number of first drafts that `allowed` prescribes, which are those of `Matcher.drafts`.

    All tokens are allowed until a mask is written. An error of a sequence's grammar goes to the member's `fail`.
    """

    def __init__(self, members: Members, k: int, *, drafted: bool, tree: bool = False):
        self.members, self.k, self.tree = members, k, tree
        words = next(member.picker.matcher.words for _, member in self._guided(finished=True))  # type: ignore[union-attr]
        self.rows = mx.array(np.full((len(members), k + 1, words), -1, np.int32))
        self._rows = np.array(self.rows, copy=False)  # the memory of `rows`
        self.allowed = mx.array(np.full((k, len(members), words), -1, np.int32)) if drafted else None
        self.forced = [0] * len(members)
        self._known: list[list[int]] = [[] for _ in members]  # drafts after which masks are made
        self._first: list[np.ndarray] = [*self._rows]  # these masks; those of a tree wait for its rows

    def _guided(self, *, finished: bool = False) -> Iterator[tuple[int, Member]]:
        for i, member in enumerate(self.members):
            if member is not None and member.picker.matcher is not None and (finished or not member.finished):
                yield i, member

    def begin(self) -> None:
        """Write each sequence's mask of its first row: the tokens allowed after all tokens that the host has read.

        With `allowed`, write there that the first drafts must be those of `Matcher.drafts`, and the mask of the draft
        after them; and in `rows` the masks of the rows after them. Call this before the drafts are computed.
        """
        k, allowed = self.k, self._writable()
        for i, member in self._guided():
            matcher = member.picker.matcher
            assert matcher
            try:
                matcher.follow(member.history.tokens)
                forced = matcher.drafts(min(k, matcher.most)) if allowed is not None else []
                self._first[i] = np.empty_like(self._rows[i]) if self.tree else self._rows[i]
                fits = matcher.fill(self._first[i][: len(forced) + 1], forced)
            except GrammarError as e:
                member.fail(e)
                continue
            self._known[i], self.forced[i] = forced[:fits], fits
            if allowed is None:
                continue
            for depth, token in enumerate(forced[:fits]):
                allowed[depth, i] = 0
                allowed[depth, i, token // 32] = np.uint32(1 << token % 32).astype(np.int32)
            if fits < k:
                allowed[fits, i] = self._first[i][fits]

    def write(self, drafts: Sequence[Sequence[int]] = ()) -> None:
        """Write the masks of all rows: call `begin`, then `read` with the drafts; () if the cycle has no drafts."""
        self.begin()
        if drafts:
            self.read(drafts)

    def _writable(self) -> np.ndarray | None:
        """Return the memory of `allowed`, which no computation may be reading."""
        return None if self.allowed is None else np.array(self.allowed, copy=False)

    @property
    def first_unknown(self) -> int:
        """The first depth at which a draft must be read before the next one is masked: the minimum of `forced`."""
        return min((self.forced[i] for i, _ in self._guided()), default=self.k)

    def read(self, drafts: Sequence[Sequence[int]]) -> int:
        """Write to `rows` the mask after each given draft; the last, for the next draft, also to `allowed`.

        drafts: the first drafts of each sequence; of a tree all, followed by their parents. Masks after a draft that
        the grammar forbids, or that is an end-of-text token, stay as they are.

        Returns the maximum, over sequences with a grammar, of the number of first drafts that are allowed. For a
        tree it is 0.
        """
        if self.tree:
            self._read_trees(drafts)
            return 0
        most, allowed = 0, self._writable()
        for i, member in self._guided():
            matcher, new, known = member.picker.matcher, [*drafts[i]], self._known[i]
            assert matcher
            fits = sum(1 for _ in takewhile(bool, map(eq, new, known)))
            if fits < len(new):
                self.forced[i] = min(self.forced[i], fits)
                try:
                    fits = matcher.fill(self._rows[i][: len(new) + 1], new, known=fits + 1)
                except GrammarError as e:
                    member.fail(e)
                    continue
                self._known[i] = new[:fits]
            if allowed is not None and self.forced[i] <= fits == len(new) < len(allowed):
                allowed[fits, i] = self._rows[i][fits]
            most = max(most, fits)
        return most

    def _read_trees(self, drafts: Sequence[Sequence[int]]) -> None:
        for i, member in self._guided():
            tokens, parents, stem = drafts[i][: self.k], drafts[i][self.k :], [0]
            for token in self._known[i]:
                below = (
                    row for row in range(1, self.k + 1) if (parents[row - 1], tokens[row - 1]) == (stem[-1], token)
                )
                if (row := next(below, None)) is None:
                    break
                stem.append(row)
            self._rows[i][stem] = self._first[i][: len(stem)]
            self.forced[i] = min(self.forced[i], len(stem) - 1)
            matcher = member.picker.matcher
            assert matcher
            try:
                matcher.fill_tree(self._rows[i], tokens, parents, stem)
            except GrammarError as e:
                member.fail(e)

    def of_rows(self, count: int) -> Masks:
        """Return the masks of the first `count` rows of each sequence."""
        return self.rows if count > self.k else self.rows[:, :count]
