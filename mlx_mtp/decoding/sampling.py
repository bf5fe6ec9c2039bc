"""Choose the target's tokens from its logits: processors on each row's own history, then the sampler.

The random key of a draw depends on its position only: with a seed, the token at position t depends on the tokens
before it and on nothing else, so that a seed gives the same tokens with any drafts.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p, apply_xtc

from ..grammar import Matcher
from ..layers.target import Target
from ..machine.ranges import PART, Range, check
from .masks import masked
from .ranges import TEMPERATURE

Sampler = Callable[[mx.array], mx.array]
LogitsProcessor = Callable[[mx.array, mx.array], mx.array]
DRAFT_SAMPLING = ("greedy", "coupled")
MOST_TOP = 64  # maximum number of greatest logits that a model's `choice` returns without writing the others


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

    @property
    def top(self) -> int:
        """Number of greatest logits, at most MOST_TOP, that a draw needs besides all logits' logsumexp; 0 for all."""
        whole = self.xtc_probability > 0 or (self.min_p > 0 and self.min_tokens_to_keep > 1)
        return 0 if whole or self.top_k > MOST_TOP else self.top_k

    def scores(self, logprobs: mx.array, coin: mx.array) -> mx.array:
        """Return the logits of a draw, float32 [1, V]: logprobs [1, V] after all filters, divided by the temperature.

        coin: random key that decides whether XTC applies.
        """
        if 0 < self.top_p < 1:
            logprobs = apply_top_p(logprobs, self.top_p)
        if self.min_p > 0:
            logprobs = apply_min_p(logprobs, self.min_p, self.min_tokens_to_keep)
        if self.xtc_probability > 0:
            # mlx-lm's filter with probability 1; the coin is drawn here, with a key of the position.
            cut = apply_xtc(logprobs, 1.0, self.xtc_threshold, list(self.xtc_special_tokens))
            logprobs = mx.where(mx.random.uniform(key=coin) < self.xtc_probability, cut, logprobs)
        if self.top_k > 0:
            logprobs = apply_top_k(logprobs, self.top_k)
        return logprobs.astype(mx.float32) * (1.0 / self.temp)

    def draw(self, logprobs: mx.array, key: mx.array) -> mx.array:
        """Return a token [1] drawn from logprobs [1, V] with these options; the likeliest if `greedy`."""
        if self.greedy:
            return mx.argmax(logprobs, axis=-1)
        coin, dice = mx.random.split(key)
        return gumbel_max(self.scores(logprobs, coin), dice)

    @property
    def filters(self) -> dict[str, float]:
        """The options that `draw_top` kernels apply, as their keyword arguments; top_k is not among them."""
        return {"temp": self.temp, "top_p": self.top_p, "min_p": self.min_p}


@dataclass
class Picker:
    """Chooses the target's token in every row of a verify.

    sampler:    the user's, logprobs [1, V] -> token [1]; MLX's random state is then the draw's key. None: `options`.
    processors: mlx-lm's logits processors, (tokens [T], logits [1, V]) -> logits [1, V].
    key:        uint32 [2]; the draw at position t uses `key_at(key, t)`.
    draft_sampling: how drafts are chosen, of DRAFT_SAMPLING; see `draft_sampling.py`.
    matcher: follows the answer through its grammar and makes the masks of allowed tokens; None without a grammar.
    """

    options: Sampling = Sampling()
    sampler: Sampler | None = None
    processors: Sequence[LogitsProcessor] = ()
    logprobs: bool = False
    key: mx.array = field(default_factory=lambda: mx.zeros(2, mx.uint32))
    draft_sampling: str = "coupled"
    matcher: Matcher | None = None

    @property
    def plain(self) -> bool:
        """Whether the likeliest allowed tokens are always taken, without processors and logprobs to return."""
        return self.sampler is None and self.options.greedy and not self.processors and not self.logprobs

    def pick(self, model: Target, hidden: mx.array, position, history: Any, drafts: mx.array, mask: Any = None):
        """Return tokens [M] int32 chosen after hidden rows [1, M, H], and their logprobs [M, V] or None.

        As `__call__`, but logits are not computed if a kernel can choose with these options, without a mask.
        """
        o, raw = self.options, self.sampler is None and not self.processors and not self.logprobs and mask is None
        choice = model.choice(hidden) if raw and (o.greedy or o.unfiltered or o.top > 0) else None
        if choice is None:
            return self(model.logits(hidden)[0], position, history, drafts, mask)
        if o.greedy:
            return choice.greedy(), None
        if o.unfiltered:
            return choice.draw(self.key, position, o.temp), None
        top = choice.top(o.top)
        return choice.draw_top(top, self.key, position, **o.filters, vocab_size=model.vocab_size), None

    def __call__(self, logits: mx.array, position, history: Any, drafts: mx.array, mask: mx.array | None = None):
        """Return tokens [M] int32 for positions `position`.., chosen from logits [M, V]; and logprobs [M, V] or None.

        history: token ids [T] before the rows. drafts: int32 [M - 1]; processors of row i read the history and the
        first i drafts. mask: of the allowed tokens, int32 [M, words], applied after the processors.
        """
        if mask is not None and not self.processors:
            logits = masked(logits, mask)
        if self.plain:
            return mx.argmax(logits, axis=-1).astype(mx.int32), None
        past = mx.array(history if self.processors else [], mx.int32)
        tokens, logprobs = [], []
        for i in range(logits.shape[0]):
            row = logits[i : i + 1]
            for process in self.processors:
                row = process(mx.concatenate([past, drafts[:i]]), row)
            if mask is not None and self.processors:
                row = masked(row, mask[i : i + 1])
            row = row - mx.logsumexp(row, axis=-1, keepdims=True)
            tokens.append(self._draw(row, key_at(self.key, position + i)).reshape(1))
            logprobs.append(row)
        return mx.concatenate(tokens).astype(mx.int32), mx.concatenate(logprobs) if self.logprobs else None

    def _draw(self, logprobs: mx.array, key: mx.array) -> mx.array:
        if self.sampler is None:
            return self.options.draw(logprobs, key)
        with random_state(key):
            return self.sampler(logprobs)


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


def gumbel_max(scores: mx.array, key: mx.array) -> mx.array:
    """Return a token, int32 [1], drawn from softmax(scores [1, V]).

    A token's noise depends on the key alone. Two rows with total variation distance TV therefore give the same token
    with probability (1 - TV) / (1 + TV) or more (Daliri, Musco and Suresh, arXiv 2408.07978). Kernels draw with the
    same noise; mx.random.categorical, which sums probabilities in order, has no such bound.
    """
    noise = mx.random.gumbel(scores.shape, key=key)
    return mx.argmax(scores.astype(mx.float32) + noise, axis=-1).astype(mx.int32)


def whole_rows(values: mx.array, tokens: mx.array, vocab_size: int) -> mx.array:
    """Return rows [n, vocab_size] with `values` [n, m] at `tokens`, [m] or [n, m], and -infinity elsewhere."""
    rows = mx.full((values.shape[0], vocab_size), -float("inf"), values.dtype)
    return mx.put_along_axis(rows, mx.broadcast_to(tokens, values.shape), values, axis=-1)


def key_at(key: mx.array, position: Any) -> mx.array:
    """Return the key, uint32 [2], of the draw at a position: an integer, or int32 [] or [1]."""
    return key + mx.pad(mx.array(position).reshape(1).astype(mx.uint32), (1, 0))


def random_key(seed: int | None) -> mx.array:
    """Return a base key, uint32 [2], made from the seed; for None drawn from this thread's MLX random state."""
    if seed is None:
        key = mx.random.randint(0, 2**31 - 1, (2,)).astype(mx.uint32)
        # Evaluated here: the thread's next draw happens outside of this turn.
        drawn, _ = (np.array(array) for array in (key, *_random_state()))
        return mx.array(drawn)
    # Hashed: otherwise neighbouring seeds would share keys at neighbouring positions.
    return mx.random.split(mx.random.key(seed))[0]
