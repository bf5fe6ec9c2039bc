"""Draft the tokens that followed an earlier copy of the sequence's last tokens (prompt lookup).

The search runs on the device and includes tokens that the host has not read, so that the cycle can be built ahead.
The host's own search (`TokenHistory.matched`) only decides whether a lookup is worthwhile. Source: Saxena, "Prompt
Lookup Decoding" (2023).
"""

import mlx.core as mx

from ...tuning.plan import SHORTEST
from ..history import LONGEST, TokenHistory
from ..run import Drafts, Run
from .drafter import Drafter, Frame


class Lookup(Drafter):
    """Drafts the tokens that followed the longest match of each sequence's last tokens. It has no caches."""

    source = "lookup"
    in_step = False

    def __init__(self, most: int):
        self.most = most

    def propose(self, frame: Frame, run: Run, k: int) -> Drafts:
        blank, found = mx.zeros(k, mx.int32), []
        for i, member in enumerate(frame.members):
            kept = run.last[i : i + 1] + 1
            free = member is None
            found.append(blank if free else continued(member.history, member.base + 1, run.tokens[i], kept, k))
        return Drafts(mx.stack(found))


def continued(history: TokenHistory, end: int, tokens: mx.array, kept: mx.array, k: int) -> mx.array:
    """Return the k tokens that followed the newest of the longest matches of a sequence's suffix, int32 [k].

    The sequence is the first `end` tokens of the history and the first `kept` of `tokens` [R] (int32 [1], on the
    device). A continuation that reaches the end repeats itself. Without a match the drafts are arbitrary.
    """
    blank = mx.full((LONGEST,), -1, mx.int32)
    padded = mx.concatenate([blank, mx.array(history.tokens[:end]), tokens])
    size, length = padded.size - LONGEST, end + kept
    same = mx.ones((size,), mx.int32)
    matched = mx.zeros((size,), mx.int32)
    for i in range(LONGEST):  # end e: the i-th token before it is padded[LONGEST + e - 1 - i]
        first = LONGEST - 1 - i
        same = same * (padded[first : first + size] == mx.take(padded, length + first))
        matched = matched + same
    ends = mx.arange(size)
    found = (ends < length) & (matched >= SHORTEST)
    source = mx.argmax(mx.where(found, matched * size + ends, -1), keepdims=True)
    ahead = mx.arange(k) % mx.maximum(length - source, 1)
    return mx.take(padded, LONGEST + source + ahead)
