"""Estimate the tokens of a tree of drafts from the trees that were verified before.

Both kinds of counts are pairs, as those of chains. Of a class of nodes, by depth and by the drafter's probability of
the path, they are the paths that were right and all of them: they calibrate the probability. Of a rank, the place of
a node among those of its tree by probability, they are the sum of calibrated probabilities and the number of trees. A
tree's most probable nodes are a tree, so trees of 15 drafts are counts of trees of 3, 7 and 11.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul

from .costs import PRIOR_WEIGHT
from .plan import Node

CountPairs = Sequence[Sequence[float]]
DEPTHS = (1, 2, 4)  # the last depth of each class of depths but the deepest
CHANCES = (0.03, 0.1, 0.3, 0.6, 0.85)  # where the classes of probabilities end: 0.5 to 1.2 apart as logarithms
CLASSES = (len(DEPTHS) + 1) * (len(CHANCES) + 1)
SECOND = 0.3  # assumed share of wrong first choices where the second one is right
TAIL = 0.8  # assumed probability of the next node, over that of the least probable node observed


def class_of(node: Node) -> int:
    """Return the index of a node's class."""
    return bisect_left(DEPTHS, node.depth) * (len(CHANCES) + 1) + bisect_right(CHANCES, node.probability)


def calibrations(trees: Sequence[Sequence[Node]]) -> list[tuple[float, float]]:
    """Return the pair of each class of nodes, means over the trees of several sequences."""
    found, share = [[0.0, 0.0] for _ in range(CLASSES)], 1 / len(trees)
    for node in (node for nodes in trees for node in nodes):
        pair = found[class_of(node)]
        pair[0] += share * node.kept
        pair[1] += share
    return [(right, seen) for right, seen in found]


def ranks(trees: Sequence[Sequence[Node]], classes: CountPairs) -> list[tuple[float, float]]:
    """Return the pair of each rank, means over the trees. classes: the counts of all classes of nodes."""
    each = []
    for nodes in trees:
        found = sorted(nodes, key=lambda node: -node.probability)
        each.append([_calibrated(node, *classes[class_of(node)]) for node in found])
    return [(sum(of_rank) / len(trees), 1.0) for of_rank in zip(*each, strict=True)]


def _calibrated(node: Node, right: float, seen: float) -> float:
    return (PRIOR_WEIGHT * min(node.probability, 1.0) + right) / (PRIOR_WEIGHT + seen)


def tree_chances(counts: CountPairs, chain: Sequence[float], nodes: int) -> list[float]:
    """Return the estimated probability of each of a tree's nodes, the most probable first, that its path is right.

    Their sum is the number of drafts that such a tree is expected to add. counts: of ranks. chain: shares of accepted
    drafts of the same drafter by depth; a rank with few counts is estimated from them, as a chain with second choices
    at each depth. A rank behind all that have counts is TAIL times as probable as the one before.
    """
    reached = [1.0, *accumulate(chain, mul)]
    prior = sorted((*reached[1:], *(SECOND * (before - after) for before, after in pairwise(reached))), reverse=True)
    found, last = [], 1.0
    for i in range(nodes):
        right, seen = counts[i] if i < len(counts) else (0.0, 0.0)
        expected = TAIL * last if 0 < len(counts) <= i else prior[i] if i < len(prior) else 0.0
        found.append(last := (PRIOR_WEIGHT * expected + right) / (PRIOR_WEIGHT + seen))
    return found
