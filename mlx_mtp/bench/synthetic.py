"""Draw what is accepted: the heads run and cost what they cost, but the target is made to say what they drafted.

So texts mean nothing. A rate is the share of a depth's drafts that are kept, as results state it: a draft is kept
with all before it, so that none is above the one before.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ..decoding.sampling import Picker
from ..layers.target import Target

POSITIONS = 8191  # a draw belongs to a position, modulo this: cycles replay, and runs repeat, with the same draws
DEPTHS = 16


def check_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """Return one rate per depth; ValueError for one that is no chance, or above the one before."""
    if not rates:
        raise ValueError("synth_rates=(): allowed is one number between 0 and 1 per depth")
    if wrong := [rate for rate in rates if not 0 <= rate <= 1]:
        raise ValueError(f"synth_rates={wrong[0]}: allowed is between 0 and 1")
    if risen := [pair for pair in itertools.pairwise(rates) if pair[1] > pair[0]]:
        raise ValueError(f"synth_rates={risen[0][1]}: allowed behind {risen[0][0]} is no more than that")
    return tuple(rates)


def rate_at(rates: Sequence[float], depth: int) -> float:
    """Return the rate at a depth; behind the last that is given they fall on as they did there."""
    if depth < len(rates):
        return rates[depth]
    last, before = rates[-1], rates[-2] if len(rates) > 1 else 1.0
    return last * (last / before if before else 0.0) ** (depth + 1 - len(rates))


def draws(rates: Sequence[float], seed: int) -> mx.array:
    """Draw whether the draft at a depth of the cycle at a position is kept; bool [POSITIONS, DEPTHS]."""
    chances = mx.array([rate_at(rates, depth) for depth in range(DEPTHS)])
    return mx.random.uniform(shape=(POSITIONS, 1), key=mx.random.key(seed)) < chances


@contextmanager
def drawn_acceptance(rates: Sequence[float], seed: int = 0) -> Iterator[None]:
    """Let every verify inside accept as many drafts as are drawn; a handful of operations on k numbers per cycle.

    Where a draft is to be right the target's token becomes the draft, where it is to be wrong another one.
    """
    right, pick = draws(check_rates(rates), seed), Picker.pick
    mx.eval(right)

    def forced(self: Picker, model: Target, hidden: mx.array, position: Any, history: Any, drafts: mx.array):
        tokens, logprobs = pick(self, model, hidden, position, history, drafts)
        if not (k := drafts.size):
            return tokens, logprobs
        row = right[mx.array(position).reshape(1) % POSITIONS][0, :k]
        wrong = mx.where(tokens[:k] == drafts, (drafts + 1) % model.vocab_size, tokens[:k])
        return mx.concatenate([mx.where(row, drafts, wrong), tokens[k:]]), logprobs

    Picker.pick = forced
    try:
        yield
    finally:
        Picker.pick = pick
