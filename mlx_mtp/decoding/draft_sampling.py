"""Choose what an MTP head drafts: its likeliest token, or at a temperature a draw from its distribution.

greedy:    its likeliest token d, kept with the target's probability of it, p(d).
coupled:   a draw from its distribution q, filtered as the target's is, with the noise of the target's own draw at
           that position (`gumbel_max`); kept where both give the same token. The text is the target's own draws, so
           a seed gives the same one whatever was drafted.

Drafts of a user's own sampler, and at temperature 0, are greedy. Processors change the target's rows only.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from ..layers.target import Target
from .sampling import Picker, Sampling, key_at, whole_row


class Choice(NamedTuple):
    """A drafted token int32 []; where asked for, the head's probability of it at temperature 1, float32 []."""

    token: mx.array
    confidence: mx.array | None = None


@dataclass(frozen=True)
class DraftChooser:
    """How a draft is chosen from an MTP head's output row.

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

    def __call__(self, model: Target, depth: int, row: mx.array, position: mx.array) -> Choice:
        """Draft the token at `position`, int32 [] or [1], that the output row [1, 1, H] of head `depth` guesses."""
        if self.mode == "greedy" and not self.confidence:
            return Choice(model.mtp[depth].token(model.draft_choice(depth, row)).astype(mx.int32))
        rows = model.draft_rows(depth, row)
        choice = None if rows is None else self._without_logits(rows, model, depth, position)
        return choice or self._from_logits(_logits(model, depth, row), position)

    def _without_logits(self, rows: Any, model: Target, depth: int, position: mx.array) -> Choice | None:
        """Choose by the LM head's kernel; None where that cannot."""
        head, size = model.mtp[depth], rows.head.module.weight.shape[0]
        if self.mode == "coupled" and self.options.unfiltered:
            # The kernel's noise is that of the rows of its weights.
            plain = not self.confidence and _tokens(head, size) is None
            return Choice(rows.draw(self.key, position, self.options.temp)[0]) if plain else None
        n = 1 if self.mode == "greedy" else min(self.options.top, size)
        if n == 0:
            return None
        values, indices, total = rows.top(n)
        logprobs, tokens = values - total[:, None], head.token(indices)
        token = tokens[0, 0]
        if self.mode == "coupled":
            top, size = (values, tokens, total), model.vocab_size
            token = rows.draw_top(top, self.key, position, **self.options.filters, vocab_size=size)[0]
        probability = (mx.exp(logprobs) * (tokens == token)).sum() if self.confidence else None
        return Choice(token.astype(mx.int32), probability)

    def _from_logits(self, logits: mx.array, position: mx.array) -> Choice:
        """Choose from logits [1, V] in the target's vocabulary."""
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        greedy = self.mode == "greedy"
        token = mx.argmax(logprobs, axis=-1) if greedy else self.options.draw(logprobs, key_at(self.key, position))
        probability = mx.exp(logprobs[0, token[0]].astype(mx.float32)) if self.confidence else None
        return Choice(token[0].astype(mx.int32), probability)


def _tokens(head: Any, n: int) -> mx.array | None:
    """List the target's tokens that n rows of a head's logits stand for; None where those are their numbers."""
    rows = mx.arange(n)
    tokens = head.token(rows)
    return None if tokens is rows else tokens


def _logits(model: Target, depth: int, row: mx.array) -> mx.array:
    """Compute a head's logits [1, V], -infinity for tokens that it does not know."""
    logits = model.draft_logits(depth, row)[0]
    tokens = _tokens(model.mtp[depth], logits.shape[-1])
    return logits if tokens is None else whole_row(logits, tokens[None], model.vocab_size)
