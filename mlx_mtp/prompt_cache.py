"""The state of one conversation: target caches, head caches, and what joins them.

Depth j's slot p (see `draft.py`) lives at position p + j of its cache, so every cache counts positions alike:
position i of depth j reads token x_{i+1}, and all heads stand at the same offset, `primed`.
"""

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .cache import Parts, make_kv_cache

SPILL = 64  # the backlog is joined and cut at about this many rows, not at each one


@dataclass
class Mark:
    """A PromptCache's state at one moment: references only, nothing is copied."""

    primed: int
    kept: list[mx.array]
    backlog: list[mx.array]
    offsets: list[Any]
    parts: list[Parts] | None

    def release(self) -> None:
        """Let go of the buffers, so that the next write to them is in place."""
        self.parts = None


class PromptCache:
    """Caches of the target (`layers`) and of its heads (`heads`), and the tokens they hold.

    After a generation it holds every token of the conversation except the last one yielded, exactly as if the
    tokens had been decoded one by one. To go on, pass that token and what follows it as the next prompt.

    primed:  positions that the heads have read.
    backlog: the target's hidden rows [1, r, H] that they have not read yet, ending at the last position held.
    kept:    for depths 1.., the previous depth's output [1, 1, H] at position primed - 1.
    reach:   how many last rows the heads' windows can see at all; None where a head attends to everything.
    """

    def __init__(self, layers: list, heads: list, reach: int | None, kept: list[mx.array]):
        self.layers, self.heads, self.reach = layers, heads, reach
        self.tokens: list[int] = []
        self.primed = 0
        self.backlog: list[mx.array] = []
        self.kept = kept

    @property
    def offset(self) -> int:
        """Tokens held."""
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self._all()) + sum(a.nbytes for a in (*self.kept, *self.backlog))

    def _all(self) -> list:
        return [*self.layers, *self.heads]

    @property
    def arrays(self) -> list[mx.array]:
        """Every array of the state, for `mx.eval`."""
        return [part for c in self._all() for part in c.parts] + self.kept + self.backlog

    def reserve(self, rows: int) -> None:
        """Expect `rows` positions: buffers grow to them in one step."""
        for c in self._all():
            c.reserve(rows)

    def push(self, hidden: mx.array) -> None:
        """Add hidden rows for the heads to read later; those beyond every head's reach are dropped."""
        if not self.heads:
            return
        self.backlog.append(hidden)
        if len(self.backlog) > SPILL:
            self.backlog = [mx.concatenate(self.backlog, axis=1)]
        excess = sum(rows.shape[1] for rows in self.backlog) - (self.reach or math.inf)
        if excess >= SPILL:
            self.backlog = [mx.concatenate(self.backlog, axis=1)[:, int(excess) :]]

    def to_device(self) -> None:
        """Hand the position to the device: one shared array offset for the target, one for the heads."""
        for caches, offset in ((self.layers, self.layers[0].offset), (self.heads, self.primed)):
            shared = mx.array(offset)
            for c in caches:
                c.seek(shared, offset)

    def rollback(self, n: mx.array) -> None:
        """Take the last n positions of the target back, for a device-side n."""
        offset = self.layers[0].offset - n
        for c in self.layers:
            c.seek(offset, c.limit)

    def heads_follow(self) -> None:
        """Move the heads to where the target stands."""
        for c in self.heads:
            c.seek(self.layers[0].offset, self.layers[0].limit)

    def bound(self, base: int, rows: int) -> None:
        """Tell the caches how far, at most, a run of `rows` rows from position `base` has brought them."""
        for c in self.layers:
            c.limit = base + rows
        for c in self.heads:
            c.limit = base

    def mark(self) -> Mark:
        """The state now, to go back to with `restore`."""
        offsets = [(c.offset, c.limit) for c in self._all()]
        return Mark(self.primed, self.kept, list(self.backlog), offsets, [c.parts for c in self._all()])

    def restore(self, mark: Mark) -> None:
        """Go back to a mark; where its buffers were released, later rows stay in them and are overwritten."""
        self.primed, self.kept, self.backlog = mark.primed, mark.kept, list(mark.backlog)
        for c, (offset, limit) in zip(self._all(), mark.offsets, strict=True):
            c.seek(offset, limit)
        if mark.parts is not None:
            for c, parts in zip(self._all(), mark.parts, strict=True):
                c.parts = parts

    def settle(self, tokens: list[int]) -> None:
        """Come to rest holding `tokens`: every position is a host integer again."""
        self.tokens = tokens
        for c in self.layers:
            c.seek(len(tokens), len(tokens))
        for c in self.heads:
            c.seek(self.primed, self.primed)


def make_prompt_cache(
    model: Any,
    *,
    num_draft_tokens: int | None = None,
    kv_bits: int | None = None,
    mtp_kv_bits: int | None = None,
    kv_group_size: int = 64,
    max_kv_size: int | None = None,
) -> PromptCache:
    """An empty cache for `model`, with room for `num_draft_tokens` heads (None: all it has).

    kv_bits, mtp_kv_bits: bits of the target's and the heads' keys and values (None: not quantized).
    max_kv_size: full-attention layers keep only this many last positions. Raises ValueError on a bad value.
    """
    for name, bits in (("kv_bits", kv_bits), ("mtp_kv_bits", mtp_kv_bits)):
        if bits not in (None, 2, 3, 4, 5, 6, 8):
            raise ValueError(f"{name}={bits}: allowed are 2, 3, 4, 5, 6, 8 and None")
    if max_kv_size is not None and max_kv_size < 1:
        raise ValueError(f"max_kv_size={max_kv_size}: allowed is 1 or more")
    heads = model.head_windows()
    if num_draft_tokens is not None:
        heads = heads[:num_draft_tokens]
    target = {"bits": kv_bits, "group_size": kv_group_size}
    draft = {"bits": mtp_kv_bits, "group_size": kv_group_size}
    return PromptCache(
        [make_kv_cache(window or max_kv_size, **target) for window in model.windows()],
        [make_kv_cache(window, start=depth, **draft) for depth, window in enumerate(heads)],
        None if None in heads else sum(window for window in heads if window),
        [model.no_hidden() for _ in heads[1:]],
    )
