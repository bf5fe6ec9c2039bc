"""Grow a draft tree level by level: one pass of the drafter reads the most probable paths of the level before."""

from typing import Protocol

import mlx.core as mx

from .draft_sampling import Choosers, DraftOutput
from .run import Drafts
from .tree_choice import Beam

# By least number of nodes: maximum levels, paths per level, and a factor of logits, `Choosers.sharpness`. With 1.0, 7
# nodes are too broad for texts that a head predicts well: 0.92x of SmolLM2's best chain in one answer, now 0.98x.
SHAPES = {1: (3, 3, 1.0), 5: (7, 4, 1.3), 9: (7, 6, 1.0)}


class TreePaths(Protocol):
    """The paths of a tree that a drafter reads, W of each of n sequences, in its own order of sequences first."""

    def read(self, tokens: mx.array, index: mx.array) -> DraftOutput:
        """Return the output after one more token of each path. tokens: int32 [n * W, 1].

        index: int32 [n * W], the path, of those that were read last, that each continues; first the sequence.
        """
        ...


def shape_of(k: int, most: int) -> tuple[int, int, float]:
    """Return the levels of a tree of k nodes, at most `most`, the number of paths per level, and the sharpness."""
    levels, width, sharpness = next(shape for least, shape in reversed(SHAPES.items()) if least <= k)
    levels = min(levels, k, most)
    return levels, min(k, max(width, -(-k // levels))), sharpness


def grown(
    k: int,
    choose: Choosers,
    first: DraftOutput,
    position: mx.array,
    paths: TreePaths,
    most: int,
    levels: int | None = None,
) -> Drafts:
    """Return a tree of k nodes per sequence, without a host read.

    first: output for the first draft of each of n sequences. position: that draft's, int32 [n]. most: maximum levels
    that `paths` can read. levels: their number, if it and the sharpness are not those of `shape_of`.
    """
    n, output, before = position.size, first, 1
    usual, width, sharpness = shape_of(k, most)
    if levels is None:
        levels, choose.sharpness = usual, sharpness
    beam = Beam(n, width)
    for depth in range(levels):
        if depth:
            index = mx.arange(n)[:, None] * before + beam.came
            output, before = paths.read(beam.tokens.reshape(-1, 1), index.flatten()), width
        beam.extend(*choose.best(output, position + depth, depth, width))
    return choose.used(beam.best(k))
