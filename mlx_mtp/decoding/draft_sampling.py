"""Choose a drafter's tokens: the likeliest one, or at a temperature a draw from its distribution.

greedy:    the likeliest token d, which is accepted with the target's probability of it, p(d).
coupled:   a draw from the drafter's distribution, filtered like the target's, with the noise of the target's own draw
           at that position (`choose_rows`); accepted if both draws give the same token. The output is always the
           target's own draws, so that a seed gives the same tokens with any drafts.

With a user's sampler, and at temperature 0, drafts are greedy. Processors change the target's rows only.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, cast

import mlx.core as mx

from ..cache.tree import along
from ..kernels import choose_rows, draw_scores, masked
from ..layers.lm_head import NormedRows
from ..layers.target import Target
from .members import Members
from .run import NO_DRAFTS, Drafts
from .sampling import Picker, Sampling, keys_of, whole_rows


class Draft(NamedTuple):
    """Drafted tokens of each sequence, int32 [n, 1] or [n, k]; their probabilities, float32, if requested."""

    token: mx.array
    confidence: mx.array | None = None


class DraftOutput(Protocol):
    """A drafter's output for each sequence's next token, from which a `DraftChooser` chooses."""

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
    """Chooses the drafts of n sequences from a drafter's output.

    options: of each sequence's draws; temperature 0 for greedy drafts. keys: those of the targets' draws, uint32
    [n, 2]. confidence: return each token's probability too. fused: the model's `Runtime.choosing`.
    """

    options: tuple[Sampling, ...]
    keys: mx.array
    confidence: bool = False
    fused: bool = True

    @classmethod
    def of(cls, *pickers: Picker, confidence: bool = False, fused: bool = True) -> "DraftChooser":
        """Return the chooser for sequences whose targets' tokens are chosen by `pickers`.

        A sequence's drafts are greedy if its picker has a user's sampler or the `draft_sampling` "greedy".
        """
        coupled = (picker.sampler is None and picker.draft_sampling == "coupled" for picker in pickers)
        options = (p.options if draws else Sampling() for p, draws in zip(pickers, coupled, strict=True))
        return cls(tuple(options), keys_of(pickers), confidence, fused)

    @property
    def greedy(self) -> bool:
        """Whether all drafts are the likeliest tokens."""
        return all(options.greedy for options in self.options)

    @property
    def by_temperature(self) -> bool:
        """Whether there is one sequence, whose drafts are draws by temperature alone."""
        return len(self.options) == 1 and not self.greedy and self.options[0].unfiltered

    def __call__(self, output: DraftOutput, position: mx.array) -> Draft:
        """Return the `Draft` for an output. position: of each sequence's draft, int32 [n]."""
        if self.greedy and not self.confidence:
            return Draft(output.likeliest())
        rows = output.choice()
        choice = None if rows is None else self._without_logits(rows, cast(HeadOutput, output), position)
        return choice or self.from_logits(output.logits(), position)

    def _without_logits(self, rows: NormedRows, output: HeadOutput, position: mx.array) -> Draft | None:
        """Return the draft chosen from `rows`; None if options, confidence or the head's vocabulary need logits."""
        if self.greedy:
            values, indices, total = rows.top(1)
            return Draft(output.token(indices).astype(mx.int32), mx.exp(values - total[:, None]))
        # The kernel draws noise per row of its weights: equal to the target's only for the same vocabulary.
        same = output.known(rows.head.module.weight.shape[0]) is None
        if self.confidence or not self.by_temperature or not same:
            return None
        return Draft(rows.draw(self.keys[0], position, self.options[0].temp)[:, None])

    def from_logits(self, logits: mx.array, position: mx.array) -> Draft:
        """Return the draft from logits [n, V] in the target's vocabulary. position: of each draft, int32 [n]."""
        return self.from_rows(logits[:, None], position)

    def from_rows(self, logits: mx.array, position: mx.array) -> Draft:
        """Return k drafts of each sequence, a `Draft` of [n, k], from logits [n, k, V]; position: of the first, [n].

        The probability, if requested, is at temperature 1 and without filters.
        """
        if self.greedy:
            tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
        else:
            tokens = choose_rows(logits, self.options, self.keys, position, fused=self.fused)
        if not self.confidence:
            return Draft(tokens)
        chosen = mx.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        return Draft(tokens, mx.exp((chosen - mx.logsumexp(logits, axis=-1)).astype(mx.float32)))

    def scores(
        self, logits: mx.array, position: mx.array, tokens: mx.array | None = None, vocab: int = 0
    ) -> mx.array:
        """Return float32 [n, W, V], greatest for the draft, from logits [n, W, V]: all W rows have one position [n].

        They are logits, or with the noise of the target's own draw, from which the target's token is likelier that of
        a great score than from logits alone. tokens: ids, int32 [n, W, V], if the logits are only of some of `vocab`
        tokens, to which XTC is not applied.
        """
        if self.greedy:
            return logits.astype(mx.float32)
        options, ids = self.options, [None] * len(logits) if tokens is None else tokens
        if tokens is not None:
            most = logits.shape[-1] - 1
            options = [replace(o, xtc_probability=0.0, top_k=o.top_k if o.top_k <= most else 0) for o in options]
        sequences = zip(logits, options, self.keys, position.astype(mx.uint32)[:, None], ids, strict=True)
        return mx.stack([draw_scores(*each, vocab) for each in sequences])


class Choosers:
    """Chooses the drafts of all sequences of a step, in which they may be masked.

    model: the target. members: one per slot, None for a free slot. allowed: masks of the tokens that may be drafted,
    int32 [k, n, words] by depth; None if any may. confidence: choices contain each draft's probability too.
    sharpness: factor of logits without noise of which `best` returns the log-probabilities.
    """

    def __init__(
        self,
        model: Any,
        members: Members,
        allowed: mx.array | None = None,
        *,
        confidence: bool = False,
        sharpness: float = 1.0,
    ):
        self.allowed, self.sharpness = allowed, sharpness
        pickers = [Picker() if member is None else member.picker for member in members]
        self.chooser = DraftChooser.of(*pickers, confidence=confidence, fused=model.runtime.choosing)
        self._used = mx.array([[float(member is not None)] for member in members])

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
        return self._without_free(self.chooser(output, position))

    def rows(self, logits: mx.array, position: mx.array) -> Draft:
        """Return k drafts of each sequence, as `DraftChooser.from_rows`; not for masked ones."""
        assert not self.masked
        return self._without_free(self.chooser.from_rows(logits, position))

    def best(self, output: DraftOutput, position: mx.array, depth: int, count: int) -> tuple[mx.array, mx.array]:
        """Return log-probabilities and tokens [n, W, count] of the best drafts after each of W paths of n sequences.

        output: of n * W rows. With noise the probability is an estimate that the draft is the target's own draw; that
        of a missing draft is 0. Masks end with the last depth of `allowed`.
        """
        n, mask = len(self.chooser.options), None
        if self.allowed is not None and depth < len(self.allowed):
            mask = self.allowed[depth]
        sharp = self.sharpness if self.chooser.greedy else 1.0
        if mask is None and self.chooser.greedy and sharp == 1 and (rows := output.choice()) is not None:
            values, indices, total = rows.top(min(count, rows.head.weights_read))
            chances, tokens = values - total[:, None], cast(HeadOutput, output).token(indices)
        else:
            logits, known, vocab = _columns(output, n)
            if known is None:
                logits = masked(logits, None if mask is None else mask[:, None])
            elif mask is not None:
                logits = logits + along(masked(mx.zeros((n, vocab)), mask), known)
            scores = self.chooser.scores(logits, position, known, vocab) * sharp
            whole = scores - mx.logsumexp(scores, axis=-1, keepdims=True)
            whole = mx.where(mx.isnan(whole), -mx.inf, whole)  # no token can be drafted
            tokens = mx.argpartition(-whole, kth=min(count, whole.shape[-1]) - 1, axis=-1)[..., :count]
            chances = mx.take_along_axis(whole, tokens, axis=-1)
            tokens = tokens if known is None else mx.take_along_axis(known, tokens, axis=-1)
        chances = mx.minimum(chances, 0)  # in spite of rounding: no path is more probable than its beginning
        chances, tokens = (rows.reshape(n, -1, rows.shape[-1]) for rows in (chances, tokens.astype(mx.int32)))
        missing = [(0, 0), (0, 0), (0, count - tokens.shape[-1])]
        return mx.pad(chances, missing, constant_values=-mx.inf), mx.pad(tokens, missing)

    def used(self, tree: Drafts) -> Drafts:
        """Return a tree in which the drafts of free slots have the probability 0."""
        assert tree.confidence is not None
        return tree._replace(confidence=tree.confidence * self._used)

    def _without_free(self, draft: Draft) -> Draft:
        return draft if draft.confidence is None else draft._replace(confidence=draft.confidence * self._used)


def _columns(output: DraftOutput, n: int) -> tuple[mx.array, mx.array | None, int]:
    """Return logits [n, W, C] of an output's n * W rows, and if C are only some tokens, ids and the vocabulary."""
    scores, tokens, vocab = output if isinstance(output, LogitRow) else (output.logits(), None, 0)
    if tokens is None:
        return scores.reshape(n, -1, scores.shape[-1]), None, vocab
    logits = scores.reshape(n, -1, scores.shape[-1])
    return logits, mx.broadcast_to(tokens, scores.shape).reshape(logits.shape).astype(mx.int32), vocab


def joined(choices: list[Draft]) -> Drafts:
    """Return the `Drafts` made of one `Draft` per depth, the first depth first; NO_DRAFTS for none."""
    if not choices:
        return NO_DRAFTS
    tokens = mx.concatenate([choice.token for choice in choices], axis=1)
    chances = [choice.confidence for choice in choices if choice.confidence is not None]
    confidence = mx.concatenate(chances, axis=1) if chances else None
    return Drafts(tokens, confidence, tuple(choice.token for choice in choices))
