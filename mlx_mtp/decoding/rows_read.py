"""Hold what the host reads of a run: tokens of one sequence, and the nodes of its tree."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..tuning.plan import Node


class RowsRead(NamedTuple):
    """A sequence's part of a run that the host has read: accepted drafts and the next token; the tree's drafts."""

    tokens: list[int]
    accepted: int
    nodes: Sequence[Node] = ()


def nodes_of(packed: list[int]) -> list[Node]:
    """Return the drafts of one sequence's tree in the order of rows. packed: its row of `Run.nodes`."""
    kept, depths, bits = np.array(packed, np.int32).reshape(3, -1)
    return [*map(Node, depths.tolist(), bits.view(np.float32).tolist(), kept.astype(bool).tolist())]
