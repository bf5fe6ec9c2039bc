"""Choose what a drafter drafts: its likeliest token, or at a temperature a draw from its distribution.

greedy:    its likeliest token d, kept with the target's probability of it, p(d).
coupled:   a draw from its distribution q, filtered as the target's is, with the noise of the target's own draw at
           that position (`gumbel_max`); kept where both give the same token. The text is the target's own draws, so
           a seed gives the same one whatever was drafted.

Drafts of a user's own sampler, and at temperature 0, are greedy. Processors change the target's rows only.
"""

from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from ..layers.lm_head import Rows
from ..layers.target import Target
from .members import Members
from .sampling import Picker, Sampling, key_at, whole_row


class Choice(NamedTuple):
    """A token of each sequence, int32 [n, 1]; where asked for, the drafter's probability of it, float32 [n, 1]."""

    token: mx.array
    confidence: mx.array | None = None


class HeadOutput(NamedTuple):
    """What the MTP head of `depth` gave for each sequence's next token, [n, 1, H] before its norm."""

    model: Target
    depth: int
    rows: mx.array

    def of(self, sequence: int) -> "HeadOutput":
        """What it gave for one of the sequences."""
        return self._replace(rows=self.rows[sequence : sequence + 1])

    def likeliest(self) -> mx.array:
        """Choose the likeliest tokens, int32 [n, 1]."""
        return self.token(self.model.draft_choice(self.depth, self.rows)).astype(mx.int32)

    def choice(self) -> Rows | None:
        """Return what chooses among the logits' numbers without logits; None where they must be computed."""
        return self.model.draft_rows(self.depth, self.rows)

    def logits(self) -> mx.array:
        """Compute logits [n, V], -infinity for tokens that the head does not know."""
        logits = self.model.draft_logits(self.depth, self.rows)[:, 0]
        tokens = self.known(logits.shape[-1])
        return logits if tokens is None else whole_row(logits, tokens[None], self.model.vocab_size)

    def token(self, number: mx.array) -> mx.array:
        """Translate numbers of the head's logits to the target's tokens."""
        return self.model.mtp[self.depth].token(number)

    def known(self, n: int) -> mx.array | None:
        """List the tokens that n of its logits stand for; None where those are their numbers."""
        numbers = mx.arange(n)
        tokens = self.token(numbers)
        return None if tokens is numbers else tokens


@dataclass(frozen=True)
class DraftChooser:
    """How a draft of one sequence is chosen from an MTP head's output.

    mode: of `sampling.DRAFT_SAMPLING`. options, key: those of the target's draws. confidence: give it with each
    token; a coupled draw of temperature alone then needs the head's logits, and no kernel for its LM head is used.
    """

    mode: str
    options: Sampling
    key: mx.array
    confidence: bool = False

    @classmethod
    def of(cls, picker: Picker, *, confidence: bool = False) -> "DraftChooser":
        """Make the chooser that suits how the target's tokens are chosen."""
        draws = picker.sampler is None and not picker.options.greedy
        return cls(picker.draft_sampling if draws else "greedy", picker.options, picker.key, confidence)

    @property
    def likeliest(self) -> bool:
        """Whether it takes the likeliest token, and no more is asked."""
        return self.mode == "greedy" and not self.confidence

    def __call__(self, output: HeadOutput, position: mx.array) -> Choice:
        """Draft the token at `position`, int32 [1]; the output is one sequence's."""
        if self.likeliest:
            return Choice(output.likeliest())
        rows = output.choice()
        choice = None if rows is None else self._without_logits(rows, output, position)
        return choice or self.from_logits(output.logits(), position)

    def _without_logits(self, rows: Rows, output: HeadOutput, position: mx.array) -> Choice | None:
        """Choose by the LM head's kernel; None where that cannot."""
        size = rows.head.module.weight.shape[0]
        if self.mode == "coupled" and self.options.unfiltered:
            # The kernel's noise is that of the rows of its weights.
            plain = not self.confidence and output.known(size) is None
            return Choice(rows.draw(self.key, position, self.options.temp)[:, None]) if plain else None
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
        return Choice(token.astype(mx.int32), chance)

    def from_logits(self, logits: mx.array, position: mx.array) -> Choice:
        """Choose from logits [1, V] in the target's vocabulary."""
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        greedy = self.mode == "greedy"
        token = mx.argmax(logprobs, axis=-1) if greedy else self.options.draw(logprobs, key_at(self.key, position))
        token = token[:, None].astype(mx.int32)
        chance = mx.exp(mx.take_along_axis(logprobs, token, axis=-1).astype(mx.float32)) if self.confidence else None
        return Choice(token, chance)


class Choosers:
    """How the drafts of each sequence of a step are chosen; those that are only likeliest, all at once."""

    def __init__(self, members: Members, *, confidence: bool = False):
        self.n = len(members)
        every = {i: DraftChooser.of(m.picker, confidence=confidence) for i, m in enumerate(members) if m is not None}
        self.own = {i: chooser for i, chooser in every.items() if not chooser.likeliest}

    def __call__(self, output: HeadOutput, position: mx.array) -> Choice:
        """Draft each sequence's token at its `position`, int32 [n]."""
        if not self.own:
            return Choice(output.likeliest())
        if self.n == 1:
            return self.own[0](output, position)
        likeliest = mx.split(output.likeliest(), self.n)
        each = [Choice(token, mx.zeros((1, 1))) for token in likeliest]  # of a free slot, which is sure of nothing
        for i, chooser in self.own.items():
            each[i] = chooser(output.of(i), position[i : i + 1])
        tokens = mx.concatenate([choice.token for choice in each])
        chances = [choice.confidence for choice in each if choice.confidence is not None]
        return Choice(tokens, mx.concatenate(chances) if len(chances) == self.n else None)


def joined(choices: list[Choice]) -> tuple[mx.array | None, mx.array | None]:
    """Put a depth's choices beside the next one's: tokens [n, k], and confidence."""
    if not choices:
        return None, None
    chances = [choice.confidence for choice in choices if choice.confidence is not None]
    return mx.concatenate([choice.token for choice in choices], axis=1), mx.concatenate(
        chances, axis=1
    ) if chances else None
