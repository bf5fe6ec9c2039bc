"""Choose a block's drafts from its output rows: each by itself, along a Markov chain, or among a few candidates."""

from typing import Any

import mlx.core as mx

from ...layers.block_drafter import BlockNetwork
from ...layers.lm_head import NormedRows, head_on, logits_of
from ..draft_sampling import Choosers, Draft, LogitRow, joined
from ..members import Members
from ..run import Drafts
from ..sampling import whole_rows


class BlockChoice:
    """Chooses the drafts of n sequences from a block's output rows.

    newest: their newest tokens, int32 [n, 1]. first: positions [n] of the first drafts. allowed: as in `Choosers`.
    confidence: whether each draft's probability is needed; a network's confidence head, if any, estimates it.
    """

    def __init__(
        self,
        model: Any,
        net: BlockNetwork,
        members: Members,
        newest: mx.array,
        first: mx.array,
        allowed: mx.array | None = None,
        *,
        confidence: bool,
    ):
        self.model, self.net, self.newest, self.first = model, net, newest, first
        self.confidence = confidence
        self.by_head = confidence and net.shape.confidence
        self.choose = Choosers(model, members, allowed, confidence=confidence and not self.by_head)

    def __call__(self, rows: mx.array) -> Drafts:
        """Return the drafts, one token for each output row [n, k, H], with their confidence if needed."""
        if (tokens := self._without_logits(rows)) is not None:
            return Drafts(tokens)
        logits = self._logits(rows)
        if self.net.shape.selector:
            return self._among_candidates(rows, logits)
        return self._along_chain(rows, logits)

    def _without_logits(self, rows: mx.array) -> mx.array | None:
        """Return tokens [n, k] chosen by the kernel of the target's LM head; None if it is off or cannot choose them.

        It cannot with confidence, with masks, with a head, Markov head, selector, scale or cap of the network, or
        unless all sequences are greedy or a single one draws by temperature alone.
        """
        shape, head = self.net.shape, head_on(self.model.unembedding())
        plain = not (shape.selector or shape.markov or shape.softcap or "head" in self.net or self.choose.masked)
        if not plain or head is None or self.confidence or shape.scale != 1:
            return None
        chooser, normed = self.choose.chooser, rows.astype(self.model.no_hidden().dtype).flatten(0, 1)
        if chooser.greedy:
            return NormedRows(head, normed).greedy().reshape(rows.shape[:2])
        if not chooser.by_temperature:
            return None
        return NormedRows(head, normed).draw(chooser.keys[0], self.first, chooser.options[0].temp)[None]

    def _logits(self, rows: mx.array) -> mx.array:
        """Return logits [n, k, V] of the output rows, scaled and capped as in the drafter's training."""
        shape = self.net.shape
        if "head" in self.net:
            logits = self.net.head(rows)
        else:
            logits = logits_of(self.model.unembedding(), rows.astype(self.model.no_hidden().dtype))
        logits = logits if shape.scale == 1 else logits * shape.scale
        return mx.tanh(logits / shape.softcap) * shape.softcap if shape.softcap else logits

    def _along_chain(self, rows: mx.array, logits: mx.array) -> Drafts:
        """Return drafts chosen all at once; row by row with masks or a Markov head, which read the draft before."""
        net: Any = self.net
        tokens = net.token(mx.arange(logits.shape[-1])) if "d2t" in net else None
        before, state, choices = self.newest, None, list[Draft]()
        if not (self.choose.masked or net.shape.markov or self.by_head):
            if tokens is not None:
                logits = whole_rows(logits.flatten(0, 1), tokens, self.model.vocab_size).reshape(*rows.shape[:2], -1)
            return Drafts(*self.choose.rows(logits, self.first))
        for i in range(rows.shape[1]):
            scores, embedded = logits[:, i], None
            if net.shape.markov:
                embedded = net.markov_head.markov_w1(before)[:, 0]
                bias, state = net.markov_head(embedded, rows[:, i], state)
                scores = scores + bias
            choice = self.choose(LogitRow(scores, tokens, self.model.vocab_size), self.first + i, i)
            if self.by_head:
                choice = choice._replace(confidence=net.confidence_head(rows[:, i], embedded))
            choices.append(choice)
            before = choice.token
        return joined(choices)

    def _among_candidates(self, rows: mx.array, logits: mx.array) -> Drafts:
        """Return drafts chosen row by row among each row's likeliest tokens, scored with the draft before it."""
        selector: Any = self.net.candidate_selector
        tokens, values = selector.candidates(logits)
        projected = selector.hidden_projection(rows)
        before, choices = self.newest, list[Draft]()
        for i in range(rows.shape[1]):
            scores = values[:, i] + selector.edges(projected[:, i], before, tokens[:, i])
            row = LogitRow(scores, tokens[:, i], self.model.vocab_size)
            choices.append(self.choose(row, self.first + i, i))
            before = choices[-1].token
        return joined(choices)
