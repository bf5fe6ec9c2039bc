"""Draft with MTP heads or a block drafter, by cycle: both follow the target, and each plan names the one that drafts.

A call of either reads the run's hidden rows, of which heads take the stream before the final norm, and the block
drafter the streams after it along the last axis (`Drafter.reads`). While heads draft the block drafter reads the same
rows, which costs little. While blocks draft the heads of one sequence are set aside (`cache/aside.py`); in a pool
they read the rows, too.
"""

from typing import Any

import mlx.core as mx

from ...cache.absorb import window_reach
from ...cache.step_cache import StepCache, seek
from ...layers.target import Target
from ..run import NO_DRAFTS, Drafts, Run
from .block import Block
from .drafter import Drafter, Frame
from .heads import Heads


class HeadsAndBlock(Drafter):
    """MTP heads and a block drafter. A cache's `heads` are the heads' caches, then the block drafter's.

    Plans name them "heads" and "block". usual_heads: maximum number of the heads' drafts in an adaptive cycle.
    """

    source = Block.source
    absorbs = True

    def __init__(self, model: Target, heads: Heads, block: Block, usual_heads: int):
        self.heads, self.block, self.chained = heads, block, heads.chained
        self.most, self.usual, self.trees = block.most, block.usual, heads.trees and block.trees
        self.others, self.windows = {heads.source: usual_heads}, (*heads.windows, *block.windows)
        self.net, self.nets = block.net, (model.mtp[0], block.net)
        # Heads read few rows after their own drafts; while blocks draft for one sequence they read none.
        self.row_counts = {"": (1 + usual_heads, *block.row_counts[""]), block.source: block.row_counts[""]}
        self.spare = {block.source: len(heads.windows)}
        self._reach = window_reach(heads.windows)

    @property
    def reads(self) -> tuple[int, ...]:
        """As `Drafter.reads`: the numbers of target layers after which the block drafter reads the stream."""
        return self.block.reads

    @property
    def summary(self) -> str:
        """The kind and sizes of the block drafter in words, for the report."""
        return self.block.summary

    def propose(self, frame: Frame, run: Run, k: int) -> Drafts:
        """Let both read all rows of the run, heads unless they are aside; return k drafts of the plan's source.

        NO_DRAFTS for k = 0.
        """
        heads, block = self._split(frame.cache)
        drafts, reading = NO_DRAFTS, [(self.block, block)]
        for part, cache in [(self.heads, heads), *reading] if heads.heads else reading:
            drafting = k if part.source == frame.plan.source else 0
            made = part.propose(frame._replace(cache=cache), run, drafting)
            drafts = made if drafting else drafts
        frame.cache.kept = heads.kept
        return drafts

    def read_rows(self, model: Target, cache: StepCache, hidden: mx.array, tokens: Any, first: int) -> None:
        """Let both read the rows; heads with windows read at most the last `window_reach` rows.

        The heads read the same rows after a pause in a model without a block drafter.
        """
        heads, block = self._split(cache)
        rows = hidden.shape[1]
        skipped = max(0, rows - self._reach) if self._reach else 0
        if skipped:
            self.heads.skip_to(heads, first + skipped, rows - skipped)
        self.heads.read_rows(model, heads, hidden[:, skipped:], tokens[skipped:], first + skipped)
        self.block.read_rows(model, block, hidden, tokens, first)
        cache.kept = heads.kept

    def _split(self, cache: StepCache) -> tuple[Any, Any]:
        n = len(cache.heads) - len(self.block.windows)
        return PartCache(cache, cache.heads[:n], cache.kept), PartCache(cache, cache.heads[n:], [])


class PartCache:
    """The part of a StepCache that one of the two drafters uses: the target's caches, its own `heads` and `kept`."""

    def __init__(self, whole: StepCache, heads: list[Any], kept: list[mx.array]):
        self.whole, self.layers, self.heads, self.kept = whole, whole.layers, heads, kept

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)  # places and features of pictures

    def heads_follow(self) -> None:
        """Set the position of this drafter's caches to the target's."""
        seek(self.heads, self.layers[0].offset, self.layers[0].limit)
