"""Draft from the sequence's own past: the tokens that followed an earlier copy of the last ones (prompt lookup).

The host finds the copies of the tokens that it has read. Those of the cycle that is still running are compared on the
device, so such a cycle is built ahead like any other. Source of the idea: Saxena, "Prompt Lookup Decoding" (2023).
"""

from typing import Any

import mlx.core as mx
import numpy as np

from ...tuning.plan import Role
from ..history import TokenHistory
from ..run import Drafts, Run
from .drafter import Drafter, Frame

TRIED = 8  # copies that are compared with the tokens that the host has not read


class Lookup(Drafter):
    """Drafts the tokens that followed an earlier copy of each sequence's last tokens (`continued`); has no caches.

    A sequence without such a copy, or a free slot, gets k drafts of token 0. most: maximum drafts of a cycle.
    """

    source = "lookup"
    role = Role.COPY
    in_step = False

    def __init__(self, most: int):
        self.most = most

    def limit(self, sequence: Any) -> int:
        return sequence.max_lookup

    def propose(self, frame: Frame, run: Run, k: int) -> Drafts:
        found = []
        for i, member in enumerate(frame.members):
            copies = [] if member is None else member.history.matches(member.base + 1)[:TRIED]
            if member is None or not copies:
                found.append(mx.zeros(k, mx.int32))
                continue
            starts = [start for _, start in copies]
            found.append(continued(member.history, member.base + 1, starts, run.tokens[i], run.last[i : i + 1], k))
        return Drafts(mx.stack(found))


def continued(
    history: TokenHistory, size: int, starts: list[int], tokens: mx.array, last: mx.array, k: int
) -> mx.array:
    """Return int32 [k]: the tokens that followed an earlier copy of a sequence's end.

    The sequence is the first `size` tokens of a history and the first last + 1 of `tokens` [R], which only the device
    has; last: int32 [1]. starts: indices of the tokens that followed earlier copies of the history's end, best first.
    The first copy that `tokens` also continue is used, or the first of all if none is. A copy that reaches the end
    repeats. Where rows of a picture followed the copy, token 0 is returned.
    """
    rows, starts_of = tokens.size, np.array(starts, np.int32)[:, None]
    known = np.maximum(history.text_at(np.minimum(starts_of + np.arange(rows + k), size - 1)), 0)
    each = mx.concatenate([mx.array(known), mx.broadcast_to(tokens, (len(starts), rows))], axis=1)
    period = mx.array(size - starts_of)
    follow = _at(each, mx.broadcast_to(mx.arange(rows), (len(starts), rows)), period, rows + k) == tokens
    whole = mx.take(mx.cumprod(follow.astype(mx.int32), axis=1), last, axis=1)
    best = mx.argmax(whole, axis=0)  # the first of equal ones
    return mx.take(_at(each, last + 1 + mx.arange(k) % period, period, rows + k), best, axis=0)[0]


def _at(each: mx.array, offset: mx.array, period: mx.array, width: int) -> mx.array:
    """Return the tokens [C, n] at offsets from each of C starts, out of `each` [C, width + R].

    From `period` [C, 1] on, where the history ends, the tokens after the first `width` follow.
    """
    return mx.take_along_axis(each, mx.where(offset < period, offset, width + offset - period), axis=1)
