"""Keep the state of a recurrent layer (gated delta rule, Mamba2) and roll it back to any row of a verify.

A verify keeps the state before its rows, and the rows' effect on it: the tape. The next call replays the accepted
rows of the tape, then adds its own, so the number of accepted rows stays on the device. A layer that computes rows
one by one may keep the state after each as a tape of one array, from which one state is taken without a replay.
"""

import operator
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .layer_cache import LayerCache, OncePerPass, Parts, shapes_of
from .tree import along

Replay = Callable[..., mx.array]


class RecurrentCache(LayerCache):
    """State and tape of one recurrent layer of one sequence (B = 1), with positions like `LinearKVCache`.

    parts: (position of the state, int32 [1]; state; the convolution's rows before and on the tape [1, K-1+T, C]), and
           after a verify of T rows the tape: the inputs of the recurrence ([1, T, ..] arrays), or one array of the
           states after each row.
    """

    name = "recurrent"
    is_state = True

    def __init__(self):
        self.offset: int | mx.array = 0
        self.limit = 0
        self.parts: tuple[Any, ...] = ()
        self.once = OncePerPass()

    def convolved(self, rows: mx.array, taps: int) -> mx.array:
        """Return the input [1, taps-1+S, C] of a causal convolution of `taps` taps over new rows [1, S, C]."""
        before, accepted = self.convolution_rows(rows, taps), self.accepted
        if accepted is not None:
            before = mx.take(before, self.once(positions_from, accepted, taps - 1), axis=1)
        return mx.concatenate([before, rows], axis=1)

    def convolution_rows(self, rows: mx.array, taps: int) -> mx.array:
        """Return the convolution's stored rows, before and on the tape, [1, taps-1+T, C]; zeros at the start.

        rows: new rows, for the width C and type of the zeros.
        """
        return self.parts[2] if self.parts else mx.zeros((1, taps - 1, rows.shape[2]), rows.dtype)

    def state(self, replay: Replay, new: Parts = ()) -> mx.array | None:
        """Return the state at `offset`, None at the start; with a tape, that after its accepted rows.

        replay(state, mask [1, T], *tape): returns the state after the tape rows that are true in the mask. new: the
        tape of the rows that are read next, for a cache in which each row has a path of its own.
        """
        accepted, tape = self.accepted, self.tape
        if accepted is None:
            return self.committed
        if self.replays:
            return replay(self.committed, self.once(first, accepted, tape[0].shape[1]), *tape)
        return self.chosen()

    def chosen(self) -> mx.array:
        """Return the state after the last accepted row of a tape of states; without such a row, the state before it.

        Only for a tape of one array, [n, T, ...] of n sequences.
        """
        _, before, _, states = self.parts
        newest, some = self.once(newest_of, self.accepted, states.shape[1])
        return mx.where(some, mx.take(states.flatten(0, 1), newest, axis=0), before)

    @property
    def committed(self) -> mx.array | None:
        """The stored state: before the tape, if there is one; None at the start."""
        return self.parts[1] if self.parts else None

    @property
    def tape(self) -> tuple[mx.array, ...]:
        """The tape of the last verify; empty if its rows were final."""
        return self.parts[3:]

    @property
    def accepted(self) -> mx.array | None:
        """Number of leading tape rows that are accepted, int32 [1], the row before the first draft included.

        None without a tape.
        """
        return self.once(operator.sub, self.offset, self.parts[0]) if len(self.parts) > 3 else None

    @property
    def replays(self) -> bool:
        """Whether the tape must be replayed; a tape of states is not."""
        return len(self.parts) > 4

    @property
    def final(self) -> bool:
        """Whether new rows are final: the host counts positions, and no row is rolled back."""
        return isinstance(self.offset, int)

    def advance(self, before: mx.array, after: mx.array, convolved: mx.array, tape: tuple[mx.array, ...]) -> None:
        """Store rows that were read: the state before and after them, the convolution's input, and their tape.

        If the rows are `final`, only the state after them is kept, else the state before and the tape.
        """
        rows = tape[0].shape[1]
        if isinstance(self.offset, int):
            self.offset, position = self.once(moved, self.offset, rows)
            if rows == 1:
                kept = convolved[:, 1:]
            else:  # a copy, because a slice would keep all rows of the prompt alive
                kept = mx.take(convolved, self.once(mx.arange, rows, convolved.shape[1]), axis=1)
            self.parts = (position, after, kept)
        else:
            self.parts = (self.offset, before, convolved, *tape)
            self.offset = self.once(operator.add, self.offset, rows)
        self.limit += rows

    def keep_path(self, path: mx.array) -> None:
        position, before, convolved, *tape = self.parts
        first = convolved.shape[1] - tape[0].shape[1]
        kept = mx.concatenate([convolved[:, :first], along(convolved[:, first:], path)], axis=1)
        self.parts = position, before, kept, *(along(rows, path) for rows in tape)

    def seek(self, offset: Any, limit: int) -> None:
        """Set the position. With a host integer, a tape of states is reduced to the state at this position."""
        self.offset, self.limit = offset, limit
        if isinstance(offset, int) and self.tape and not self.replays:
            position, _, convolved, states = self.parts
            taps = convolved.shape[1] - states.shape[1]
            kept = mx.take(convolved, positions_from(offset - position, taps), axis=1)
            self.parts = (mx.array([offset]), self.chosen(), kept)

    def fits(self, parts: Parts) -> bool:
        """Return whether `parts`, read from a file, have this cache's shapes, with a tape of any number of rows."""
        if len(parts) < 3:
            return False
        tape = parts[3:]
        rows = tape[0].shape[1] if tape else 0
        _, taps, *rest = self.parts[2].shape
        convolved = [((1, taps + rows, *rest), self.parts[2].dtype)]
        return shapes_of(parts[:3]) == shapes_of(self.parts[:2]) + convolved and all(t.shape[1] == rows for t in tape)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> None:
        """Return None: rows are processed one after another and need no mask."""
        return None

    @property
    def config(self) -> dict:
        return {"window": self.name}


def moved(position: int, rows: int) -> tuple[int, mx.array]:
    """Return the position after `rows` more rows, as an integer and as int32 [1]."""
    return position + rows, mx.array([position + rows])


def positions_from(start: mx.array, rows: int) -> mx.array:
    """Return the positions [rows] of `rows` rows from `start`, int32 [1]."""
    return start + mx.arange(rows)


def first(n: mx.array, rows: int) -> mx.array:
    """Return the mask [sequences, rows] of the first n rows of each sequence; n: int32 [sequences]."""
    return mx.arange(rows) < n[:, None]


def newest_of(n: mx.array, rows: int) -> tuple[mx.array, mx.array]:
    """Return the index [sequences] of each sequence's n-th row in all rows, and n > 0, [sequences, 1, 1, 1].

    n: int32 [sequences], counted from 1; where n is 0 the index is that of the sequence's first row. rows: of each.
    """
    index = mx.arange(0, n.size * rows, rows) + mx.maximum(n, 1) - 1
    return index, (n > 0).reshape(-1, 1, 1, 1)
