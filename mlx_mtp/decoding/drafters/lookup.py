"""Draft from the text's own past: what followed where the last tokens have occurred before (prompt lookup).

The search runs on the device, behind tokens that the host has not read yet, so that such a cycle is built ahead like
any other. The host searches the text it knows only to tell whether a lookup promises anything. Source of the idea:
Saxena, "Prompt Lookup Decoding" (2023).
"""

import mlx.core as mx

from ...tuning.plan import SHORTEST
from ..run import Drafts, Run
from ..text import LONGEST, Text
from .drafter import Drafter, Frame


class Lookup(Drafter):
    """Drafts what followed the longest match of each sequence's last tokens; needs no caches, and drafts in no time.

    most: drafts of a cycle.
    """

    source = "lookup"
    in_step = False

    def __init__(self, most: int):
        self.most = most

    def propose(self, frame: Frame, run: Run, k: int) -> Drafts:
        blank, found = mx.zeros(k, mx.int32), []
        for i, member in enumerate(frame.members):
            right = run.last[i : i + 1] + 1
            found.append(
                blank if member is None else continued(member.text, member.base + 1, run.tokens[i], right, k)
            )
        return Drafts(mx.stack(found))


def continued(text: Text, end: int, tokens: mx.array, right: mx.array, k: int) -> mx.array:
    """Draft what followed the last occurrence of the longest match, int32 [k], behind a text and `tokens` [R].

    end: tokens of the text that count. right: int32 [1] on the device, how many of `tokens` belong to it. Where the
    match reaches the end its continuation repeats itself; where nothing matches, the drafts are arbitrary.
    """
    blank = mx.full((LONGEST,), -1, mx.int32)
    padded = mx.concatenate([blank, mx.array(text.tokens[:end]), tokens])
    size, length = padded.size - LONGEST, end + right
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
