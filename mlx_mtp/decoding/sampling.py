"""State how a sequence's tokens are chosen: options of sampling, a caller's own functions, and random keys.

The random key of a draw depends on its position only: with a seed, the token at position t depends on the tokens
before it and on nothing else, so that a seed gives the same tokens with any drafts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from ..grammar import Matcher
from ..machine.ranges import PART, Range, check
from .logit_rules import LogitRules
from .ranges import TEMPERATURE

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
DRAFT_SAMPLING = ("greedy", "coupled")


@dataclass(frozen=True)
class Sampling:
    """mlx-lm's sampling options, with its names, order of filters and defaults."""

    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens_to_keep: int = 1
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    xtc_special_tokens: tuple[int, ...] = ()

    def validate(self, vocab_size: int) -> None:
        """Raise a ValueError that names the first option out of range."""
        tokens = Range(f"token ids from 0 to {vocab_size - 1}, below the vocabulary's size", 0, vocab_size - 1)
        ranges = {
            "temp": TEMPERATURE,
            **dict.fromkeys(("top_p", "min_p", "xtc_probability"), PART),
            "top_k": Range(f"0 (off) to {vocab_size - 1}, below the vocabulary's size", 0, vocab_size - 1),
            "min_tokens_to_keep": Range(f"1 to {vocab_size}, the vocabulary's size", 1, vocab_size),
            "xtc_threshold": Range("between 0 and 0.5", 0, 0.5, False),
        }
        for name, allowed in ranges.items():
            check(name, getattr(self, name), allowed)
        if self.xtc_probability and not all(map(tokens.fits, self.xtc_special_tokens)):
            raise ValueError(f"xtc_special_tokens={self.xtc_special_tokens}: allowed is {tokens.words}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken: at temperature 0, or if 1 / temp would overflow in 16 bits."""
        return self.temp < 1 / 65504

    @property
    def unfiltered(self) -> bool:
        """Whether no option but the temperature changes the distribution."""
        return self.top_k == 0 and not 0 < self.top_p < 1 and self.min_p == 0 and self.xtc_probability == 0


@dataclass
class Picker:
    """How the target's token is chosen in every row of a sequence (`pick`).

    sampler:    the user's, logprobs [1, V] -> token [1]; MLX's random state is then the draw's key. None: `options`.
    processors: mlx-lm's logits processors, (tokens [T], logits [1, V]) -> logits [1, V], or `LogitRules`.
    key:        uint32 [2]; the draw at position t uses `key_at(key, t)`.
    step_keys:  in a recorded step the keys of all its sequences, uint32 [n, 2], which contain this one.
    draft_sampling: how drafts are chosen, of DRAFT_SAMPLING; see `draft_sampling.py`.
    matcher: follows the answer through its grammar and makes the masks of allowed tokens; None without a grammar.
    """

    options: Sampling = Sampling()
    sampler: Sampler | None = None
    processors: Sequence[LogitsProcessor] = ()
    logprobs: bool = False
    key: mx.array = field(default_factory=lambda: mx.array([0, 0], mx.uint32))
    draft_sampling: str = "coupled"
    matcher: Matcher | None = None
    step_keys: mx.array | None = None

    @property
    def by_head(self) -> bool:
        """Whether an LM head's kernel can choose without writing logits: the likeliest tokens or unfiltered draws."""
        own = self.sampler or self.processors or self.logprobs
        return not own and (self.options.greedy or self.options.unfiltered)

    @property
    def rules(self) -> LogitRules | None:
        """The rules that are applied to all rows at once: the first of `processors`, if it is `LogitRules`."""
        first = self.processors[0] if self.processors else None
        return first if isinstance(first, LogitRules) else None

    @property
    def callers(self) -> Sequence[LogitsProcessor]:
        """The processors that are called row by row: all after `rules`."""
        return self.processors[1:] if self.rules else self.processors


@contextmanager
def random_state(key: mx.array) -> Iterator[None]:
    """Context with this thread's MLX random state set to `key`, uint32 [2]; the former state returns at the end."""
    state = _random_state()
    before, state[0] = state[0], key
    try:
        yield
    finally:
        state[0] = before


def _random_state() -> list[mx.array]:
    """Return the list that contains this thread's key: `mx.random.state` itself does not support assignment."""
    items: Any = iter(mx.random.state)  # type: ignore[call-overload]
    return items.__reduce__()[1][0]


def whole_rows(values: mx.array, tokens: mx.array, vocab_size: int) -> mx.array:
    """Return rows [n, vocab_size] with `values` [n, m] at `tokens`, [m] or [n, m], and -infinity elsewhere."""
    rows = mx.full((values.shape[0], vocab_size), -float("inf"), values.dtype)
    return mx.put_along_axis(rows, mx.broadcast_to(tokens, values.shape), values, axis=-1)


def key_at(key: mx.array, position: Any) -> mx.array:
    """Return the key, uint32 [2], of the draw at a position: an integer, or int32 [] or [1]."""
    return key + mx.pad(mx.array(position).reshape(1).astype(mx.uint32), (1, 0))


def keys_of(pickers: Sequence[Picker]) -> mx.array:
    """Return the keys of a step's sequences, uint32 [n, 2], without a launch."""
    if (keys := pickers[0].step_keys) is not None:
        return keys
    return mx.array(np.stack([np.array(picker.key) for picker in pickers]))


def random_key(seed: int | None) -> mx.array:
    """Return a base key, uint32 [2], made from the seed; for None drawn from this thread's MLX random state."""
    if seed is None:
        key = mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32)
        # Evaluated here: the thread's next draw happens outside of this turn.
        drawn, _ = (np.array(array) for array in (key, *_random_state()))
        return mx.array(drawn)
    # Hashed: otherwise neighbouring seeds would share keys at neighbouring positions. On the CPU `keys_of` reads it
    # without a wait for the GPU.
    return mx.random.split(mx.random.key(seed), stream=mx.cpu)[0]
