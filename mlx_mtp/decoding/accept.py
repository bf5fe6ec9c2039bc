"""Accept the drafts that equal the target's own tokens: a prefix of a chain, or a path of a tree."""

from typing import Any, NamedTuple

import mlx.core as mx

from ..cache.tree import RowTree, along
from .callers import Logprobs
from .run import Run


class Passed(NamedTuple):
    """Rows that the target has read, R of each of n sequences, before their tokens are chosen.

    hidden: [n, R, H]. position: that of the token after each sequence's first row, int32 [n], or an int if n = 1.
    drafts: [n, R-1] int32, of the rows after the first; None if there were none. each: as `Drafts.each`. tree: of the
    rows; None for a chain. confidence: as `Drafts.confidence`, of a tree.
    """

    hidden: mx.array
    position: Any
    drafts: mx.array | None
    each: tuple[mx.array, ...] = ()
    tree: RowTree | None = None
    confidence: mx.array | None = None


def accept(drafts: mx.array, tokens: mx.array) -> mx.array:
    """Return the length of the longest prefix of drafts [..., k] that equals tokens [..., k+1], int32 [...].

    `tokens[..., i]` is drawn from the target with the user's sampler, after the drafts before it. The output is the
    drafts that equal their draws and the first draw that differs (or the bonus token): exactly the target's draws,
    for any sampler. A greedy draft is accepted with probability p(draft), as in rejection sampling (Leviathan et al.,
    arXiv 2211.17192, with q a point mass).
    """
    matches = tokens[..., : drafts.shape[-1]] == drafts
    return mx.cumprod(matches.astype(mx.int32), axis=-1).sum(axis=-1)


def accept_path(passed: Passed, tokens: mx.array, logprobs: Logprobs, limits: mx.array | None) -> Run:
    """Return the run of the longest path of a tree whose drafts equal the target's `tokens` [n, T] at their parents.

    Its rows are the path's, so that it is the run of a chain; behind the accepted rows the last one is repeated. For
    the same reason as in `accept` these are exactly the target's draws.
    """
    hidden, _, drafts, _, tree, _ = passed
    assert tree is not None
    assert drafts is not None
    right = mx.pad(along(tokens, tree.parents) == drafts, [(0, 0), (1, 0)], constant_values=True)
    alive = along(right, tree.ancestors).all(axis=-1)
    deepest = mx.argmax(mx.where(alive, tree.depth, -1), axis=1, keepdims=True)
    path, accepted = along(tree.ancestors, deepest)[:, 0], along(tree.depth, deepest)[:, 0]
    if limits is not None:
        accepted = mx.minimum(accepted, limits)
    kept = along(drafts, mx.maximum(path[:, 1:] - 1, 0))
    own = logprobs and tuple(rows if rows is None else rows[path[i]] for i, rows in enumerate(logprobs))
    run = Run.of(along(hidden, path), along(tokens, path), accepted, kept, own)
    chances = mx.ones(drafts.shape) if passed.confidence is None else passed.confidence
    nodes = mx.concatenate([alive[:, 1:], tree.depth[:, 1:], chances.view(mx.int32)], axis=1)
    return run._replace(path=path, nodes=nodes, packed=mx.concatenate([run.packed, nodes], axis=1))
