"""Choose the nodes of a draft tree among more candidates: those whose paths are most probable."""

from typing import NamedTuple

import mlx.core as mx

from ..cache.tree import RowTree, along
from .run import Drafts


class Candidates(NamedTuple):
    """Tokens that could be drafted, M of each of n sequences; a candidate follows the one that it continues.

    tokens: int32 [n, M]. parents: int32 [n, M], the index of the candidate that each continues, -1 for the newest
    token. scores: float32 [n, M], the logarithm of the probability of the path to each, its own included, which is
    at most its parent's; -infinity for none. levels: maximum number of candidates on a path.
    """

    tokens: mx.array
    parents: mx.array
    scores: mx.array
    levels: int

    @classmethod
    def of(cls, drafts: Drafts) -> "Candidates":
        """Return the nodes of a tree with path probabilities."""
        assert drafts.tokens is not None
        assert drafts.parents is not None
        assert drafts.confidence is not None
        return cls(drafts.tokens, drafts.parents - 1, mx.log(drafts.confidence), drafts.levels)

    def joined(self) -> "Candidates":
        """Return the candidates with those of equal paths joined: the first has the best score, the others -infinity.

        Parents must come before their children.
        """
        tree = RowTree.of(self.parents + 1, self.levels)
        tokens = along(mx.pad(self.tokens, [(0, 0), (1, 0)]), tree.ancestors)
        paths = mx.where(mx.arange(tree.levels) <= tree.depth[..., None], tokens, -1)[:, 1:]
        same = (paths[:, :, None] == paths[:, None]).all(axis=-1)
        first, best = mx.argmax(same, axis=-1), mx.where(same, self.scores[:, None], -mx.inf).max(axis=-1)
        parents = mx.where(self.parents < 0, -1, along(first, mx.maximum(self.parents, 0)).astype(mx.int32))
        scores = mx.where(first == mx.arange(first.shape[1]), best, -mx.inf)
        return self._replace(parents=parents, scores=scores)

    def best(self, k: int) -> Drafts:
        """Return the tree of the k candidates with the best scores, of equal ones the first, in their order.

        With fewer than k finite scores it contains nodes of probability 0. k: at most M.
        """
        tokens, chances, parents = self.nodes(k)
        return Drafts(tokens, chances, parents=parents, levels=min(self.levels, k))

    def nodes(self, k: int) -> tuple[mx.array, mx.array, mx.array]:
        """Return the tokens, path probabilities and parents of `best`, [n, k] each."""
        count = self.tokens.shape[1]
        index, mine, other = mx.arange(count), self.scores[:, :, None], self.scores[:, None]
        ahead = (other > mine) | ((other == mine) & (index < index[:, None]))
        chosen = ahead.sum(axis=-1) < k
        row = mx.cumsum(chosen.astype(mx.int32), axis=-1)  # of each candidate, or of the last chosen one before it
        order = mx.argsort(mx.where(chosen, index, index + count), axis=-1)[:, :k]
        above = mx.where(self.parents < 0, 0, along(row, mx.maximum(self.parents, 0)))
        return along(self.tokens, order), mx.exp(along(self.scores, order)), along(above, order)


def merged_candidates(*sources: Candidates) -> Candidates:
    """Return the candidates of several sources, all of which continue the newest token."""
    before, parents = 0, []
    for each in sources:
        parents.append(mx.where(each.parents < 0, -1, each.parents + before))
        before += each.tokens.shape[1]
    tokens, scores = ([each.tokens for each in sources], [each.scores for each in sources])
    joined = (mx.concatenate(each, axis=1) for each in (tokens, parents, scores))
    return Candidates(*joined, levels=max(each.levels for each in sources))


class Beam:
    """Collects candidates level by level: of each level those with the best scores, `width` of them.

    tokens: of the newest level, int32 [n, W]. came: int32 [n, W], the index in the level before of the candidate that
    each continues. scores: float32 [n, W].
    """

    def __init__(self, n: int, width: int):
        self.width, self.levels = width, list[Candidates]()
        self.tokens = self.came = mx.zeros((n, 1), mx.int32)
        self.scores, self._before, self._count = mx.zeros((n, 1)), -1, 0

    def extend(self, logprobs: mx.array, tokens: mx.array) -> None:
        """Add the next level: C continuations of each candidate of the newest one, or of the newest token.

        logprobs: [n, W, C], of each continuation. tokens: int32 [n, W, C]. Of both, W may be 1 if they are the same
        for all candidates.
        """
        n, _, choices = logprobs.shape
        scores = (self.scores[..., None] + logprobs.astype(mx.float32)).flatten(1)
        width = min(self.width, scores.shape[1])
        best = mx.argpartition(-scores, kth=width - 1, axis=-1)[:, :width] if width < scores.shape[1] else None
        best = mx.broadcast_to(mx.arange(width), (n, width)) if best is None else best.astype(mx.int32)
        self.came, self.scores = best // choices, along(scores, best)
        grid = (n, scores.shape[1] // choices, choices)
        self.tokens = along(mx.broadcast_to(tokens, grid).flatten(1), best)
        parents = mx.full((n, width), -1, mx.int32) if self._before < 0 else self._before + self.came
        self._before, self._count = self._count, self._count + width
        self.levels.append(Candidates(self.tokens, parents, self.scores, len(self.levels) + 1))

    def best(self, k: int) -> Drafts:
        """Return the tree of the k best candidates of all levels."""
        tokens, parents, scores, _ = zip(*self.levels, strict=True)
        parts = (mx.concatenate([*each], axis=1) for each in (tokens, parents, scores))
        return Candidates(*parts, levels=len(self.levels)).best(k)
