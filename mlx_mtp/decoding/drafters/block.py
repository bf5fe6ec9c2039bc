"""Draft a block in one pass of a network that reads the target's hidden states: DFlash, DFlash2 and DSpark.

Position t of each cache holds the context row of the token at position t, from the target's states after reading it.
The block is the newest token and mask tokens behind it. Its own keys and values are written behind the context for
the time of the pass, and overwritten by the next rows.
"""

from typing import Any

import mlx.core as mx

from ...cache.ring import CALL_ROWS
from ...cache.step_cache import StepCache
from ...layers.block_drafter import BlockNetwork
from ...layers.target import Target
from ..run import NO_DRAFTS, Drafts, Run
from .block_choice import BlockChoice
from .drafter import Drafter, Frame

MOST = 15  # maximum drafts per cycle: with the newest token a ring can take back 16 rows


class Block(Drafter):
    """A block drafter: the network `net`, with a cache per layer, makes all drafts of a cycle in one pass.

    While drafting is paused it reads pending rows once there are more than MOST_UNREAD of them (`absorb`).
    """

    source = "block"
    absorbs = trees = True

    def __init__(self, net: BlockNetwork):
        self.net, shape = net, net.shape
        self.most, self.reads = min(MOST, shape.drafts), shape.taps
        self.usual = self.most  # the controller drafts fewer where that is faster
        self.row_counts = {"": (MOST + 1,)}  # its products read their weights once for all of these rows
        self.windows = tuple(reach.before for reach in shape.reaches)

    @property
    def summary(self) -> str:
        """The kind and sizes of the network in words, for the report."""
        return str(self.net.shape)

    def propose(self, frame: Frame, run: Run, k: int) -> Drafts:
        """Append all R rows of the run to the context; return k drafts after the newest tokens, NO_DRAFTS for k = 0.

        The block begins at the target's position. Its rows overwrite rejected rows of the run; rejected rows behind
        the block are masked. It has one row per draft, or per level of a tree, of which there are at most `most`.
        """
        model, cache, drafts = frame.model, frame.cache, NO_DRAFTS
        context = self.context(model, run.hidden)
        levels = min(k, self.most) if frame.plan.tree else k
        if k == 0 or run.size + levels + 1 > CALL_ROWS:  # else one call writes context and block
            self.net.append(context, cache.heads)
            cache.heads_follow()
            context = None
        if k:
            newest = run.newest()
            rows = self.rows(model, cache.heads, newest, levels, context, run.last)
            first, sure = cache.layers[0].offset + 1, bool(frame.plan.p_min)
            given = frame.members, newest, first, frame.allowed
            choice = BlockChoice(model, self.net, *given, confidence=sure)
            drafts = choice.tree(rows, k) if frame.plan.tree else choice(rows)
            cache.heads_follow()
        return drafts

    def rows(
        self,
        model: Target,
        caches: list[Any],
        newest: mx.array,
        k: int,
        context: mx.array | None = None,
        last: mx.array | None = None,
    ) -> mx.array:
        """Return the output rows [n, k, H] of a block after the newest tokens, int32 [n, 1], of n sequences.

        context, last: as in `BlockNetwork.__call__`; None if the caches are at the newest tokens.
        """
        masks = mx.full((newest.shape[0], k - self.net.shape.anchored), self.net.shape.mask_token, mx.int32)
        block = mx.concatenate([newest, masks], axis=1)
        return self.net(self._embedded(model, block), caches, context, last)[:, -k:]

    def read_rows(self, model: Target, cache: StepCache, hidden: mx.array, tokens: Any, first: int) -> None:
        """Append the context rows of hidden rows, from position `first` on; the tokens do not matter."""
        for kv in cache.heads:
            kv.seek(first, first)
        self.net.append(self.context(model, hidden), cache.heads)

    def context(self, model: Target, hidden: mx.array) -> mx.array:
        """Return the network's context rows [n, L, H] of the streams (`Drafter.reads`) in hidden rows [n, L, ..]."""
        return self.net.fused(hidden[..., model.no_hidden().shape[-1] :])

    def _embedded(self, model: Any, tokens: mx.array) -> mx.array:
        return self.net.embed_tokens(tokens) if "embed_tokens" in self.net else model.embedded(tokens)
