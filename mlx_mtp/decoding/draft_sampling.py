"""Choose a drafter's tokens: the likeliest one, or at a temperature a draw from its distribution.

greedy:    the likeliest token d, which is accepted with the target's probability of it, p(d).
coupled:   a draw from the drafter's distribution, filtered like the target's, with the noise of the target's own draw
           at that position (`gumbel_max`); accepted if both draws give the same token. The output is always the
           target's own draws, so that a seed gives the same tokens with any drafts.

With a user's sampler, and at temperature 0, drafts are greedy. Processors change the target's rows only.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol, cast

import mlx.core as mx

from ..layers.lm_head import NormedRows
from ..layers.target import Target
from .masks import masked
from .members import Members
from .run import NO_DRAFTS, Drafts
from .sampling import Picker, Sampling, key_at, whole_rows


class Draft(NamedTuple):
    """A drafted token of each sequence, int32 [n, 1]; its probability, float32 [n, 1], if requested."""

    token: mx.array
    confidence: mx.array | None = None


class DraftOutput(Protocol):
    """A drafter's output for each sequence's next token, from which a `DraftChooser` chooses."""

    def of(self, sequence: int) -> "DraftOutput":
        """Return the output of one sequence. sequence: its index, from 0."""
        ...

    def likeliest(self) -> mx.array:
        """Return the likeliest tokens, int32 [n, 1]."""
        ...

    def choice(self) -> NormedRows | None:
        """Return rows of an LM head from which a kernel can choose tokens; None if logits are needed."""
        ...

    def logits(self) -> mx.array:
        """Return logits [n, V], -infinity for tokens that cannot be drafted."""
        ...


class HeadOutput(NamedTuple):
    """The output row of the MTP head of `depth` for each sequence's next token, [n, 1, H] before its norm."""

    model: Target
    depth: int
    rows: mx.array

    def of(self, sequence: int) -> "HeadOutput":
        return self._replace(rows=self.rows[sequence : sequence + 1])

    def choice(self) -> NormedRows | None:
        return self.model.draft_rows(self.depth, self.rows)

    def likeliest(self) -> mx.array:
        return self.token(self.model.draft_choice(self.depth, self.rows)).astype(mx.int32)

    def logits(self) -> mx.array:
        logits = self.model.draft_logits(self.depth, self.rows)[:, 0]
        tokens = self.known(logits.shape[-1])
        return logits if tokens is None else whole_rows(logits, tokens, self.model.vocab_size)

    def token(self, number: mx.array) -> mx.array:
        """Return the target's token ids of indices in the head's vocabulary, in the same shape."""
        return self.model.mtp[self.depth].token(number)

    def known(self, n: int) -> mx.array | None:
        """Return the target's token ids, [n], of the head's first n logits; None if these are the ids 0..n-1."""
        numbers = mx.arange(n)
        tokens = self.token(numbers)
        return None if tokens is numbers else tokens


class LogitRow(NamedTuple):
    """One row of logits of each sequence, from which a `DraftChooser` chooses a token.

    scores: the logits [n, m]. tokens: their token ids, int32 [m] or [n, m]; None for the ids 0..m-1. vocab: size of
    the target's vocabulary.
    """

    scores: mx.array
    tokens: mx.array | None
    vocab: int

    def of(self, sequence: int) -> "LogitRow":
        one = slice(sequence, sequence + 1)
        tokens = self.tokens if self.tokens is None or self.tokens.ndim == 1 else self.tokens[one]
        return self._replace(scores=self.scores[one], tokens=tokens)

    def likeliest(self) -> mx.array:
        """Return the likeliest tokens, int32 [n, 1]."""
        best = mx.argmax(self.scores, axis=-1, keepdims=True)
        if self.tokens is None:
            return best.astype(mx.int32)
        tokens = mx.broadcast_to(self.tokens, self.scores.shape)
        return mx.take_along_axis(tokens, best, axis=-1).astype(mx.int32)

    def choice(self) -> None:
        """Return None: no kernel chooses, the logits are computed already."""

    def logits(self) -> mx.array:
        """Return the logits [n, vocab], -infinity for tokens that have none; `scores` themselves without `tokens`."""
        return self.scores if self.tokens is None else whole_rows(self.scores, self.tokens, self.vocab)


@dataclass(frozen=True)
class DraftChooser:
    """Chooses one sequence's drafts from a drafter's output.

    mode: of `sampling.DRAFT_SAMPLING`. options, key: those of the target's draws. confidence: return each token's
    probability too. A coupled draw by temperature alone then needs the logits instead of the LM head's kernel.
    """

    mode: str
    options: Sampling
    key: mx.array
    confidence: bool = False

    @classmethod
    def of(cls, picker: Picker, *, confidence: bool = False) -> "DraftChooser":
        """Return the chooser for a sequence whose target's tokens are chosen by `picker`.

        The chooser is greedy if the picker has a user's sampler or takes the likeliest tokens; else its mode is the
        picker's `draft_sampling`.
        """
        draws = picker.sampler is None and not picker.options.greedy
        return cls(picker.draft_sampling if draws else "greedy", picker.options, picker.key, confidence)

    @property
    def likeliest(self) -> bool:
        """Whether this chooser returns the likeliest token, without its probability."""
        return self.mode == "greedy" and not self.confidence

    def __call__(self, output: DraftOutput, position: mx.array) -> Draft:
        """Return the `Draft` for an output of one sequence. position: that of the draft, int32 [1]."""
        if self.likeliest:
            return Draft(output.likeliest())
        rows = output.choice()
        choice = None if rows is None else self._without_logits(rows, cast(HeadOutput, output), position)
        return choice or self.from_logits(output.logits(), position)

    def _without_logits(self, rows: NormedRows, output: HeadOutput, position: mx.array) -> Draft | None:
        """Return the draft chosen from `rows`; None if options, confidence or the head's vocabulary need logits."""
        size = rows.head.module.weight.shape[0]
        if self.mode == "coupled" and self.options.unfiltered:
            # The kernel draws noise per row of its weights: equal to the target's only for the same vocabulary.
            plain = not self.confidence and output.known(size) is None
            return Draft(rows.draw(self.key, position, self.options.temp)[:, None]) if plain else None
        n = 1 if self.mode == "greedy" else min(self.options.top, size)
        if n == 0:
            return None
        values, indices, total = rows.top(n)
        logprobs, tokens = values - total[:, None], output.token(indices)
        token = tokens[:, :1]
        if self.mode == "coupled":
            top, size = (values, tokens, total), output.model.vocab_size
            token = rows.draw_top(top, self.key, position, **self.options.filters, vocab_size=size)[:, None]
        chance = (mx.exp(logprobs) * (tokens == token)).sum(axis=-1, keepdims=True) if self.confidence else None
        return Draft(token.astype(mx.int32), chance)

    def from_logits(self, logits: mx.array, position: mx.array) -> Draft:
        """Return the draft from logits [1, V] in the target's vocabulary. position: that of the draft, int32 [1].

        The probability, if requested, is at temperature 1 and without filters.
        """
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        greedy = self.mode == "greedy"
        token = mx.argmax(logprobs, axis=-1) if greedy else self.options.draw(logprobs, key_at(self.key, position))
        token = token[:, None].astype(mx.int32)
        chance = mx.exp(mx.take_along_axis(logprobs, token, axis=-1).astype(mx.float32)) if self.confidence else None
        return Draft(token, chance)


class Choosers:
    """Chooses the drafts of all sequences of a step: greedy ones without confidence in one operation.

    members: one per slot, None for a free slot. allowed: masks of the tokens that may be drafted, int32 [k, n, words]
    by depth; None if any may. confidence: choices contain each draft's probability too.
    """

    def __init__(self, members: Members, allowed: mx.array | None = None, *, confidence: bool = False):
        self.n, self.allowed = len(members), allowed
        every = {i: DraftChooser.of(m.picker, confidence=confidence) for i, m in enumerate(members) if m is not None}
        self.drawn = {i: chooser for i, chooser in every.items() if not chooser.likeliest}

    @property
    def masked(self) -> bool:
        """Whether masks limit the tokens that may be drafted."""
        return self.allowed is not None

    def __call__(self, output: DraftOutput, position: mx.array, depth: int) -> Draft:
        """Return the `Draft` of all sequences. position: of each one's draft, int32 [n].

        depth: index of the draft, from 0. The choice's confidence is None unless requested; that of a free slot is 0.
        """
        if self.allowed is not None:
            scores = masked(output.logits(), self.allowed[depth])
            output = LogitRow(scores, None, scores.shape[-1])
        if not self.drawn:
            return Draft(output.likeliest())
        if self.n == 1:
            return self.drawn[0](output, position)
        likeliest = mx.split(output.likeliest(), self.n)
        each = [Draft(token, mx.zeros((1, 1))) for token in likeliest]  # a free slot has confidence 0
        for i, chooser in self.drawn.items():
            each[i] = chooser(output.of(i), position[i : i + 1])
        tokens = mx.concatenate([choice.token for choice in each])
        chances = [choice.confidence for choice in each if choice.confidence is not None]
        return Draft(tokens, mx.concatenate(chances) if len(chances) == self.n else None)


def joined(choices: list[Draft]) -> Drafts:
    """Return the `Drafts` made of one `Draft` per depth, the first depth first; NO_DRAFTS for none."""
    if not choices:
        return NO_DRAFTS
    tokens = mx.concatenate([choice.token for choice in choices], axis=1)
    chances = [choice.confidence for choice in choices if choice.confidence is not None]
    confidence = mx.concatenate(chances, axis=1) if chances else None
    return Drafts(tokens, confidence, tuple(choice.token for choice in choices))
