"""Acceptance that is drawn: the heads run and cost what they cost, but the target is made to say what they drafted.

So texts mean nothing. A rate is the chance that a draft is right, given that all drafts before it are.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ..sampling import Picker

POSITIONS = 8191  # a draw belongs to a position, modulo this: cycles replay, and runs repeat, with the same draws
DEPTHS = 16


def check_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """One rate per depth, the last for all deeper ones; ValueError for one that is no chance."""
    if not rates:
        raise ValueError("synth_rates=(): allowed is one number between 0 and 1 per depth")
    for rate in rates:
        if not 0 <= rate <= 1:
            raise ValueError(f"synth_rates={rate}: allowed is between 0 and 1")
    return tuple(rates)


def draws(rates: Sequence[float], seed: int) -> mx.array:
    """Whether the draft at a depth of the cycle at a position is right; bool [POSITIONS, DEPTHS]."""
    chances = mx.array([rates[min(depth, len(rates) - 1)] for depth in range(DEPTHS)])
    return mx.random.uniform(shape=(POSITIONS, DEPTHS), key=mx.random.key(seed)) < chances


@contextmanager
def drawn_acceptance(rates: Sequence[float], seed: int = 0) -> Iterator[None]:
    """Inside, every verify accepts as many drafts as are drawn; a handful of operations on k numbers more per cycle.

    Where a draft is to be right the target's token becomes the draft, where it is to be wrong another one.
    """
    right, pick = draws(check_rates(rates), seed), Picker.pick
    mx.eval(right)

    def forced(self: Picker, model: Any, hidden: mx.array, position: Any, history: Any, drafts: mx.array, q=None):
        tokens, logprobs = pick(self, model, hidden, position, history, drafts, q)
        k = drafts.size
        if not k:
            return tokens, logprobs
        row = right[mx.array(position).reshape(1) % POSITIONS][0, :k]
        wrong = mx.where(tokens[:k] == drafts, (drafts + 1) % model.vocab_size, tokens[:k])
        return mx.concatenate([mx.where(row, drafts, wrong), tokens[k:]]), logprobs

    Picker.pick = forced
    try:
        yield
    finally:
        Picker.pick = pick
