"""Draft the tokens that each sequence's grammar forces, or that probably follow its text (`Matcher.drafts`)."""

from typing import Any

import mlx.core as mx
import numpy as np

from ...tuning.plan import Role
from ..run import Drafts, Run
from .drafter import Drafter, Frame


class Forced(Drafter):
    """Drafts what each sequence's `Matcher.drafts` returns, or of a tree `Matcher.tree`; has no caches.

    The matchers must have followed all tokens. A sequence with fewer than k such tokens, or without a grammar, and a
    free slot get token 0 for the other drafts.
    """

    source = "grammar"
    role = Role.GRAMMAR
    in_step = False
    trees = True

    def __init__(self, most: int):
        self.most = most

    def limit(self, sequence: Any) -> int:
        return sequence.most_forced

    def propose(self, frame: Frame, run: Run, k: int) -> Drafts:
        if frame.plan.tree:
            return self._trees(frame, k)
        drafts = np.zeros((len(frame.members), k), np.int32)
        for row, member in zip(drafts, frame.members, strict=True):
            if member is not None and member.picker.matcher is not None:
                forced = member.picker.matcher.drafts(k)
                row[: len(forced)] = forced
        return Drafts(mx.array(drafts))

    def _trees(self, frame: Frame, k: int) -> Drafts:
        """Return trees whose missing drafts continue the newest token with probability 0."""
        tokens, parents = (np.zeros((len(frame.members), k), np.int32) for _ in range(2))
        chances = np.zeros(tokens.shape, np.float32)
        for i, member in enumerate(frame.members):
            if member is not None and member.picker.matcher is not None:
                for row, each in enumerate(member.picker.matcher.tree(k)):
                    tokens[i, row], parents[i, row], chances[i, row] = each
        return Drafts(mx.array(tokens), mx.array(chances), parents=mx.array(parents), levels=k)
