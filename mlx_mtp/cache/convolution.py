"""Keep the rows of a foreign layer's convolution of a few taps, so that it steps back on the device."""

from typing import Any

import mlx.core as mx

from .recurrent import RecurrentCache


class ConvolutionCache(RecurrentCache):
    """The input rows of a layer's convolution, where mlx-lm has an ArraysCache of one array.

    The layer assigns the rows after its last one only. `passed` takes the convolution's whole input from `input`
    instead, which the caller of the layer sets, so that those after any row of a verify are known. State and tape of
    the recurrence are zeros.
    """

    name = "convolution"
    lengths = None
    input: Any = None

    def __getitem__(self, i: int) -> Any:
        if not self.parts:
            return (None,)[i]
        _, _, rows, *tape = self.parts
        return (self.convolved(rows[:, :0], 1 + rows.shape[1] - sum(part.shape[1] for part in tape)),)[i]

    def __setitem__(self, i: int, array: mx.array) -> None:
        """Do nothing: see `passed`."""

    def advance(self, *given: Any) -> None:
        if len(given) > 1:  # not the layer's own call
            super().advance(*given)

    def passed(self, sequences: int, rows: int) -> None:
        state, (inputs, self.input) = mx.zeros((sequences, 1, 1, 1)), (self.input, None)
        self.advance(state, state, inputs, (mx.zeros((sequences, rows, 1, 1, 1)),))
