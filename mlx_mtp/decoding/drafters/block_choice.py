"""Choose a block's drafts from its output rows: each by itself, along a Markov chain, or among a few candidates."""

from typing import Any

import mlx.core as mx

from ...layers.block_drafter import BlockNetwork
from ...layers.lm_head import NormedRows, head_on, logits_of
from ..draft_sampling import Choosers, Draft, LogitRow, joined
from ..members import Members
from ..run import Drafts
from ..sampling import whole_rows
from ..tree_levels import grown

# Of a tree's scores, which are then about as high as the shares of right drafts: 1.0 is too low on the demo's block.
SHARPNESS = 1.4


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
        self.choose = Choosers(
            model, members, allowed, confidence=confidence and not self.by_head, sharpness=SHARPNESS
        )

    def __call__(self, rows: mx.array) -> Drafts:
        """Return the drafts, one token for each output row [n, k, H], with their confidence if needed."""
        if (tokens := self._without_logits(rows)) is not None:
            return Drafts(tokens)
        net, logits = self.net, self._logits(rows)
        if not (self.choose.masked or net.shape.selector or net.shape.markov or self.by_head):
            if (tokens := _known(net, logits)) is not None:
                logits = whole_rows(logits.flatten(0, 1), tokens, self.model.vocab_size).reshape(*rows.shape[:2], -1)
            return Drafts(*self.choose.rows(logits, self.first))
        return self._along_chain(BlockPaths(net, rows, logits, self.model.vocab_size), rows)

    def tree(self, rows: mx.array, k: int) -> Drafts:
        """Return a tree of k drafts with one level for each of the output rows [n, levels, H]."""
        paths = BlockPaths(self.net, rows, self._logits(rows), self.model.vocab_size)
        first = paths.read(self.newest, mx.arange(len(rows)))
        return grown(k, self.choose, first, self.first, paths, rows.shape[1], rows.shape[1])

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

    def _along_chain(self, paths: "BlockPaths", rows: mx.array) -> Drafts:
        """Return drafts chosen row by row, because each depends on the one before it."""
        net: Any = self.net
        before, choices = self.newest, list[Draft]()
        for i in range(rows.shape[1]):
            choice = self.choose(paths.read(before), self.first + i, i)
            if self.by_head:
                choice = choice._replace(confidence=net.confidence_head(rows[:, i], paths.embedded))
            choices.append(choice)
            before = choice.token
        return joined(choices)


class BlockPaths:
    """The scores of a block's tokens after each of W paths per sequence: a row of the block for each level.

    rows, logits: the block's, [n, k, H] and [n, k, V]. vocab: size of the target's vocabulary. embedded: the Markov
    head's of the tokens that were read last, [n * W, r], or None.
    """

    def __init__(self, net: Any, rows: mx.array, logits: mx.array, vocab: int):
        self.net, self.rows, self.logits, self.vocab, self.level = net, rows, logits, vocab, 0
        self.tokens, self.embedded, self.state = _known(net, logits), None, None
        if net.shape.selector:
            self.candidates, self.logits = net.candidate_selector.candidates(logits)
            self.projected = net.candidate_selector.hidden_projection(rows)

    def read(self, tokens: mx.array, index: mx.array | None = None) -> LogitRow:
        """Return the scores of the next row's tokens, of n * W rows, or of n if they do not depend on the path.

        tokens, index: as in `TreePaths.read`; without an index each path continues itself.
        """
        net, i, width = self.net, self.level, len(tokens) // len(self.rows)
        self.level += 1
        if net.shape.selector:
            parts = (self.candidates, self.logits, self.projected)
            known, logits, projected = (mx.repeat(part[:, i], width, axis=0) for part in parts)
            return LogitRow(logits + net.candidate_selector.edges(projected, tokens, known), known, self.vocab)
        if not net.shape.markov:
            return LogitRow(self.logits[:, i], self.tokens, self.vocab)
        self.embedded = net.markov_head.markov_w1(tokens)[:, 0]
        before = self.state if index is None or self.state is None else self.state[index]
        row = mx.repeat(self.rows[:, i], width, axis=0)
        bias, self.state = net.markov_head(self.embedded, row, before)
        return LogitRow(mx.repeat(self.logits[:, i], width, axis=0) + bias, self.tokens, self.vocab)


def _known(net: Any, logits: mx.array) -> mx.array | None:
    """Return the target's ids of the tokens that the logits are of, [V]; None if these are the ids 0..V-1."""
    return net.token(mx.arange(logits.shape[-1])) if "d2t" in net else None
