"""Keep the state of a recurrent layer (gated delta rule, Mamba2) and roll it back to any row of a verify.

A verify leaves the state where it was before its rows and keeps what these rows would do to it: the tape. The next
call replays the rows that were accepted, however many, and then adds its own. Nothing goes through the weights twice,
and the number of accepted rows stays on the device. Who has computed a few rows one by one anyway may keep the state
after each as a tape of one array: then nothing is replayed, one of them is taken.
"""

import operator
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .layer_cache import LayerCache, OncePerPass, Parts, shapes_of

Replay = Callable[..., mx.array]


class RecurrentCache(LayerCache):
    """Committed state and tape of one layer, with the positions of `LinearKVCache`; B = 1.

    parts: (position of the state [1] int32, state, rows before and on the tape that the convolution reads
           [1, K-1+T, C]), and after a verify of T rows what the recurrence reads of each ([1, T, ..] arrays), or one
           array of the states after each.
    """

    name = "recurrent"
    is_state = True

    def __init__(self):
        self.offset: int | mx.array = 0
        self.limit = 0
        self.parts: tuple[Any, ...] = ()
        self.once = OncePerPass()

    def convolved(self, rows: mx.array, taps: int) -> mx.array:
        """Return the input of a causal convolution of `taps` taps over new rows [1, S, C]: [1, taps-1+S, C]."""
        before, accepted = self.convolution_rows(rows, taps), self.accepted
        if accepted is not None:
            before = mx.take(before, self.once(positions_from, accepted, taps - 1), axis=1)
        return mx.concatenate([before, rows], axis=1)

    def convolution_rows(self, rows: mx.array, taps: int) -> mx.array:
        """Return the rows before and on the tape [1, taps-1+T, C]; new rows follow the accepted ones."""
        return self.parts[2] if self.parts else mx.zeros((1, taps - 1, rows.shape[2]), rows.dtype)

    def state(self, replay: Replay) -> mx.array | None:
        """Compute the state at `offset`, None at the start; `replay(state, mask [1, T], *tape)` adds a tape."""
        accepted, tape = self.accepted, self.tape
        if accepted is None:
            return self.committed
        if self.replays:
            return replay(self.committed, self.once(first, accepted, tape[0].shape[1]), *tape)
        return self.chosen()

    def chosen(self) -> mx.array:
        """Take from a tape of states the one after its last accepted row; the one before it, if none is."""
        _, before, _, states = self.parts
        newest, some = self.once(newest_of, self.accepted, states.shape[1])
        return mx.where(some, mx.take(states.flatten(0, 1), newest, axis=0), before)

    @property
    def committed(self) -> mx.array | None:
        """The state before the tape, None at the start."""
        return self.parts[1] if self.parts else None

    @property
    def tape(self) -> tuple[mx.array, ...]:
        """What `advance` was given of the last verify's rows; empty where they were final."""
        return self.parts[3:]

    @property
    def accepted(self) -> mx.array | None:
        """How many rows of the tape are accepted, [1], the newest token's among them; None without a tape."""
        return self.once(operator.sub, self.offset, self.parts[0]) if len(self.parts) > 3 else None

    @property
    def replays(self) -> bool:
        """Whether the tape is to be replayed; one of states is not."""
        return len(self.parts) > 4

    @property
    def final(self) -> bool:
        """Whether rows that are read now stay: the host counts their positions, and takes none of them back."""
        return isinstance(self.offset, int)

    def advance(self, before: mx.array, after: mx.array, convolved: mx.array, tape: tuple[mx.array, ...]) -> None:
        """Note rows read: the state before and after them, the convolution's input, and their tape.

        Where the rows are `final` only the state after them is kept, else the one before, and the tape.
        """
        rows = tape[0].shape[1]
        if isinstance(self.offset, int):
            self.offset, position = self.once(moved, self.offset, rows)
            if rows == 1:
                kept = convolved[:, 1:]
            else:  # a copy: a slice would keep the rows of the whole prompt alive
                kept = mx.take(convolved, self.once(mx.arange, rows, convolved.shape[1]), axis=1)
            self.parts = (position, after, kept)
        else:
            self.parts = (self.offset, before, convolved, *tape)
            self.offset = self.once(operator.add, self.offset, rows)
        self.limit += rows

    def seek(self, offset: Any, limit: int) -> None:
        """Set the position; where the host sets it, only the state there is kept of those on a tape."""
        self.offset, self.limit = offset, limit
        if isinstance(offset, int) and self.tape and not self.replays:
            position, _, convolved, states = self.parts
            taps = convolved.shape[1] - states.shape[1]
            kept = mx.take(convolved, positions_from(offset - position, taps), axis=1)
            self.parts = (mx.array([offset]), self.chosen(), kept)

    def fits(self, parts: Parts) -> bool:
        """Whether `parts` have the shapes of this one's, and perhaps a tape, whose rows the convolution has, too."""
        if len(parts) < 3:
            return False
        tape = parts[3:]
        rows = tape[0].shape[1] if tape else 0
        _, taps, *rest = self.parts[2].shape
        convolved = [((1, taps + rows, *rest), self.parts[2].dtype)]
        return shapes_of(parts[:3]) == shapes_of(self.parts[:2]) + convolved and all(t.shape[1] == rows for t in tape)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        """Return None: rows are read in order, there is nothing to hide."""
        return None

    @property
    def config(self) -> dict:
        return {"window": self.name}


def moved(position: int, rows: int) -> tuple[int, mx.array]:
    """Return the position `rows` further on, for the host and for the device, int32 [1]."""
    return position + rows, mx.array([position + rows])


def positions_from(start: mx.array, rows: int) -> mx.array:
    """Return the positions [rows] of `rows` rows from `start`, int32 [1]."""
    return start + mx.arange(rows)


def first(n: mx.array, rows: int) -> mx.array:
    """Mark the first of `rows` rows of each text, for n int32 [texts]: [texts, rows]."""
    return mx.arange(rows) < n[:, None]


def newest_of(n: mx.array, rows: int) -> tuple[mx.array, mx.array]:
    """Return where the last of each text's first rows lies among all texts' rows, for n int32 [texts]: [texts].

    And whether it has any, [texts, 1, 1, 1]: the index of one that has none is of no use.
    """
    index = mx.arange(0, n.size * rows, rows) + mx.maximum(n, 1) - 1
    return index, (n > 0).reshape(-1, 1, 1, 1)
