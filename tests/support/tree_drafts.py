"""A drafter without caches for tests: it drafts random trees that contain parts of a text that is given."""

import random

import mlx.core as mx
import numpy as np
from oracle_drafts import OracleDrafts

from mlx_mtp.decoding.run import NO_DRAFTS, Drafts


class TreeDrafts(OracleDrafts):
    """Drafts trees with any parents; a node is the text's token at its position, or another one.

    right: the share of right tokens. in_step: the same tree in every cycle, as part of the step.
    """

    def __init__(self, model, truth: list[int], seed: int = 0, right: float = 0.6, in_step: bool = False):
        super().__init__(model, truth, set())
        self.vocab, self.random, self.right, self.in_step = model.vocab_size, random.Random(seed), right, in_step
        self.trees: dict[int, tuple] = {}
        self.drafted: list[tuple] = []

    def grown(self, k: int) -> tuple[list[int], list[int], list[int]]:
        """Return parents, depths, and what is added to the text's token, of k nodes."""
        if self.in_step and k in self.trees:
            return self.trees[k]
        kind, parents, depths = self.random.choice(["any", "chain", "deep", "star"]), [], [0]
        for i in range(k):
            choices = {"any": range(i + 1), "chain": [i], "deep": range(max(0, i - 1), i + 1), "star": [0]}[kind]
            parents.append(self.random.choice([*choices]))
            depths.append(depths[parents[-1]] + 1)
        wrong = [0 if self.random.random() < self.right else self.random.randint(1, self.vocab - 1) for _ in range(k)]
        self.trees[k] = parents, depths[1:], wrong
        return self.trees[k]

    def propose(self, frame, run, k):
        if not k:
            return NO_DRAFTS
        n = run.tokens.shape[0]
        each = [self.grown(k) for _ in range(n)]
        parents, depths, wrong = (mx.array(np.array([tree[i] for tree in each], np.int32)) for i in range(3))
        newest = frame.cache.layers[0].offset
        if not self.in_step:  # the step has not rolled back
            newest = mx.array([m.base if m else 0 for m in frame.members]) + run.last + 1
        at = newest[:, None] + depths
        tokens = (mx.take(self.drafts, at) + wrong) % self.vocab
        self.drafted.append((tokens, parents))
        return Drafts(tokens.astype(mx.int32), parents=parents, levels=k)
