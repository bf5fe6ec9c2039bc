"""Draft from the sequence's own past: the tokens that followed an earlier copy of the last ones (prompt lookup).

The host finds the copies of the tokens that it has read. Those of the cycle that is still running are compared on the
device, so such a cycle is built ahead like any other. Source of the idea: Saxena, "Prompt Lookup Decoding" (2023).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ...tuning.plan import Role
from ..history import TokenHistory
from ..members import Member
from ..run import Drafts, Run
from ..tree_choice import Candidates
from .drafter import Drafter, Frame

TRIED = 8  # copies of a chain that are compared with the tokens that the host has not read; for a tree it is all
BRANCHES = 8  # maximum number of copies in a tree

# Copies vote for the next token: one of n tokens with n - 1, and OTHER is the vote for any other token. Fitted to the
# standard library's sources, where a copy of 3 tokens is right in 53%, one of 32 in 92%.
OTHER = 1.7
UNFOLLOWED = 2.0  # assumed length of all copies if the device's tokens continue none


class Lookup(Drafter):
    """Drafts the tokens that followed an earlier copy of each sequence's last tokens (`Copied`); has no caches.

    A tree has up to BRANCHES copies as branches. A sequence without a copy, or a free slot, gets k drafts of token 0.
    most: maximum number of drafts of a cycle.
    """

    source = "lookup"
    role = Role.COPY
    in_step = False
    trees = True

    def __init__(self, most: int):
        self.most = most

    def limit(self, sequence: Any) -> int:
        return sequence.max_lookup

    def propose(self, frame: Frame, run: Run, k: int) -> Drafts:
        found = [_drafts(member, run, i, k, tree=frame.plan.tree) for i, member in enumerate(frame.members)]
        tokens, chances, parents = (mx.concatenate([each[part] for each in found]) for part in range(3))
        return Drafts(tokens, chances, parents=parents, levels=k) if frame.plan.tree else Drafts(tokens)


def _drafts(member: Member | None, run: Run, row: int, k: int, *, tree: bool) -> tuple[mx.array, mx.array, mx.array]:
    """Return the tokens, path probabilities and parents of one sequence's k drafts, [1, k] each."""
    copies = [] if member is None else member.history.matches(member.base + 1)[: None if tree else TRIED]
    none = mx.zeros((1, k), mx.int32), mx.zeros((1, k)), mx.arange(k)[None]
    if member is None or not copies:
        return none
    found = Copied.of(member.history, member.base + 1, copies, run.tokens[row], run.last[row : row + 1], k)
    return found.tree() if tree else (found.chain()[None], *none[1:])


class Copied(NamedTuple):
    """The tokens after C earlier copies of a sequence's end, best first.

    tokens: int32 [C, k]. followed: int32 [C, 1], 1 for copies that the tokens which only the device has continue.
    lengths: float32 [C, 1], of the copies with these tokens.
    """

    tokens: mx.array
    followed: mx.array
    lengths: mx.array

    @classmethod
    def of(
        cls,
        history: TokenHistory,
        size: int,
        copies: Sequence[tuple[int, int]],
        tokens: mx.array,
        last: mx.array,
        k: int,
    ) -> "Copied":
        """Return what followed copies of the first `size` tokens of a history and the first last + 1 of `tokens` [R].

        Only the device has `tokens` and last, int32 [1]. copies: as `TokenHistory.matches` returns them. A copy that
        reaches the end repeats. Where rows of a picture followed the copy, token 0 is returned.
        """
        rows, width = tokens.size, tokens.size + k
        lengths, starts = np.array(copies, np.int32).T[..., None]
        known = np.maximum(history.text_at(np.minimum(starts + np.arange(width), size - 1)), 0)
        each = mx.concatenate([mx.array(known), mx.broadcast_to(tokens, (len(copies), rows))], axis=1)
        period = mx.array(size - starts)
        follow = _at(each, mx.broadcast_to(mx.arange(rows), (len(copies), rows)), period, width) == tokens
        whole = mx.take(mx.cumprod(follow.astype(mx.int32), axis=1), last, axis=1)
        found = _at(each, last + 1 + mx.arange(k) % period, period, width)
        return cls(found, whole, mx.array(lengths).astype(mx.float32) + last + 1)

    def chain(self) -> mx.array:
        """Return the tokens, int32 [k], after the first copy that is followed, or after the first if none is."""
        best = mx.argmax(self.followed, axis=0)  # the first of equal ones
        return mx.take(self.tokens, best, axis=0)[0]

    def tree(self) -> tuple[mx.array, mx.array, mx.array]:
        """Return a tree of the best k drafts: its tokens, path probabilities and parents, [1, k] each.

        It has the copies that are followed, or all if none is. Equal prefixes are joined. The chance of a draft is
        its copies' share of the votes of the copies that continue the one before it.
        """
        count, k = self.tokens.shape
        alive, index = self.followed == self.followed.max(), mx.arange(count)
        alike = mx.cumprod((self.tokens[:, None] == self.tokens).astype(mx.int32), axis=-1) * alive  # [C, C, k]
        first = mx.argmax(alike, axis=1)  # of each copy and depth, the copy whose branch has the node
        above = mx.concatenate([mx.broadcast_to(alive.T[..., None], (count, count, 1)), alike[..., :-1]], axis=-1)
        votes = mx.where(self.followed.max() > 0, self.lengths, UNFOLLOWED) - 1 + mx.arange(k)
        chances = (alike * votes).sum(axis=1) / ((above * votes).sum(axis=1) + OTHER)
        own = (first == index[:, None]) & alive
        scores = mx.where(own, mx.cumsum(mx.log(chances), axis=1), -mx.inf)
        parents = mx.pad(first[:, :-1] * k + mx.arange(k - 1), [(0, 0), (1, 0)], constant_values=-1).astype(mx.int32)
        if count > BRANCHES:  # a branch starts behind a better node, so the best ones have all their parents
            best = mx.sort(mx.argsort(-scores.max(axis=1))[:BRANCHES])
            place = mx.cumsum((index[:, None] == best).any(axis=1).astype(mx.int32)) - 1
            parents = mx.where(parents < 0, -1, place[parents // k] * k + parents % k)
            parents, scores = parents[best], scores[best]
        else:
            best = index
        parts = (part.reshape(1, -1) for part in (self.tokens[best], parents, scores))
        return Candidates(*parts, levels=k).nodes(k)


def _at(each: mx.array, offset: mx.array, period: mx.array, width: int) -> mx.array:
    """Return the tokens [C, n] at offsets from each of C starts, out of `each` [C, width + R].

    From `period` [C, 1] on, where the history ends, the tokens after the first `width` follow.
    """
    return mx.take_along_axis(each, mx.where(offset < period, offset, width + offset - period), axis=1)
