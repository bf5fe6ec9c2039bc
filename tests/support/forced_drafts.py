"""Drafters whose drafts a test chooses, and which note those that they make themselves."""

from typing import Any, NamedTuple

import mlx.core as mx

from mlx_mtp.cache.tree import RowTree
from mlx_mtp.decoding.drafters.block import Block
from mlx_mtp.decoding.drafters.heads import Heads
from mlx_mtp.decoding.drafters.heads_and_block import HeadsAndBlock
from mlx_mtp.decoding.run import NO_DRAFTS, Drafts


class Call(NamedTuple):
    """A call that drafts: the plan's source, positions of the newest tokens [n], the sequences, its own drafts."""

    source: str
    at: mx.array
    members: list
    drafts: Drafts


class Forced:
    """Mixin of a drafter: notes its drafts, and replaces them by the text's tokens, wrong at some positions.

    A tree keeps its form: drafts of the same depth are the same.
    """

    def force(self, vocab: int, text: list[int], wrong) -> Any:
        """Draft these tokens from now on; return the drafter."""
        given = [(token + 1) % vocab if i in wrong else token for i, token in enumerate(text)]
        self.given, self.calls = mx.array(given + [0] * 64, mx.int32), []
        return self

    def propose(self, frame, run, k):
        drafts = super().propose(frame, run, k)
        if not k:
            return NO_DRAFTS
        at = frame.cache.layers[0].offset
        self.calls.append(Call(frame.plan.source, at, [*frame.members], drafts))
        depth = mx.arange(k) + 1
        if drafts.parents is not None:
            depth = RowTree.of(drafts.parents, drafts.levels).depth[:, 1:]
        return drafts._replace(tokens=mx.take(self.given, at[:, None] + depth), each=())

    def noted(self, end: int) -> list[tuple[str, int, list[int]]]:
        """Return (source, position of the newest token, drafts) of the calls for one sequence before a position."""
        every = [(call.source, call.at.item(), call.drafts.tokens.tolist()[0]) for call in self.calls]
        return [call for call in every if call[1] < end]


class ForcedHeads(Forced, Heads):
    pass


class ForcedBlock(Forced, Block):
    pass


class ForcedBoth(Forced, HeadsAndBlock):
    pass
