"""Draft with a small model that has the target's tokens: k small forward passes, each of which reads the last draft.

The small model reads only tokens, and its own caches are at the target's position. A call reads the token of the
run's first row again and the tokens after all rows; recurrent states keep a tape of these rows (`RecurrentCache`), so
that rejected ones are rolled back as the target's are. Sources: Leviathan et al. (arXiv 2211.17192); mlx_lm's
`--draft-model`.
"""

from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ...cache.beams import branched
from ...cache.kinds import head_dim_of
from ...cache.prompt_cache import PromptCache
from ...cache.ring import MAX_ROWS
from ...cache.step_cache import seek
from ...layers.target import Target
from ..draft_sampling import Choosers, joined
from ..run import NO_DRAFTS, Drafts, Run, rows_at
from ..tree_levels import grown
from .drafter import Drafter, Frame

MOST = MAX_ROWS - 1  # drafts of a cycle: the target verifies them with the token before them


class SmallModel(Drafter):
    """Drafts with the model `small`, a port, in the vocabulary of a target of `vocab_size` tokens.

    Plans name it "heads", because it replaces the MTP heads. `frame.cache.kept` is the token that the first row of
    the next run reads, [n, 1, 1].
    """

    most = MOST
    no_kept = (mx.array([[[0]]], mx.int32),)
    reads_hidden = False
    trees = True

    def __init__(self, small: Any, vocab_size: int, path: Path | None = None):
        """small: a loaded port. vocab_size: the target's. path: the port's directory."""
        self.small, self.vocab_size, self.path, self.windows = small, vocab_size, path, tuple(small.windows())
        self.NO_KV_BITS, self.head_dim = small.NO_KV_BITS, head_dim_of(small)

    def propose(self, frame: Frame, run: Run, k: int) -> Drafts:
        """Read the run and return k drafts of each sequence, drafted one after the other; NO_DRAFTS for k = 0."""
        cache, newest = frame.cache, run.newest()
        rows = self.outputs(mx.concatenate([cache.kept[0][:, 0], run.tokens], axis=1), cache.heads)
        cache.kept = [newest[:, None]]
        drafts = self._drafts(frame, rows_at(rows, run.last + 1), k) if k else NO_DRAFTS
        cache.heads_follow()
        return drafts

    def _drafts(self, frame: Frame, row: mx.array, k: int) -> Drafts:
        """Return k drafts, the first from the output row [n, 1, H]; recurrent states end as they were before."""
        cache, sure = frame.cache, frame.plan.p_min > 0
        choose = Choosers(frame.model, frame.members, frame.allowed, confidence=sure)
        states, offset = [(c, c.parts) for c in cache.heads if c.is_state], cache.layers[0].offset
        seek(cache.heads, offset + 1, cache.heads[0].limit)  # after the newest token
        first = SmallModelOutput(self, row)
        if frame.plan.tree:
            return grown(k, choose, first, offset + 1, SmallModelPaths(self, cache.heads), k)
        choices = [choose(first, offset + 1, 0)]
        for depth in range(1, k):
            row = self.outputs(choices[-1].token, cache.heads)
            choices.append(choose(SmallModelOutput(self, row), offset + 1 + depth, depth))
        for state, parts in states:
            state.parts = parts
        return joined(choices)

    def outputs(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """Append tokens [n, L] to the caches; return the small model's outputs [n, L, H].

        Of more than MAX_ROWS tokens, the last MAX_ROWS are a call of their own. Ids that the small model lacks become
        its last id.
        """
        own = self.small.vocab_size
        if own < self.vocab_size:
            tokens = mx.minimum(tokens, own - 1)
        pieces = mx.split(tokens, [tokens.shape[1] - MAX_ROWS], axis=1) if tokens.shape[1] > MAX_ROWS else [tokens]
        rows = [self.small.hidden(piece, caches) for piece in pieces]
        return rows[0] if len(rows) == 1 else mx.concatenate(rows, axis=1)

    def logits(self, rows: mx.array) -> mx.array:
        """Return logits [..., V] in the target's vocabulary: -infinity for tokens that the small model lacks."""
        logits = self.small.logits(rows)[..., : self.vocab_size]
        lacking = self.vocab_size - logits.shape[-1]
        if not lacking:
            return logits
        return mx.concatenate([logits, mx.full((*logits.shape[:-1], lacking), -mx.inf, logits.dtype)], axis=-1)

    def pending(self, hidden: mx.array) -> mx.array:
        """Return a zero byte for each hidden row, uint8 [1, r, 1]: only their number r counts."""
        return mx.zeros((1, hidden.shape[1], 1), mx.uint8)

    def read(self, model: Target, cache: PromptCache, tokens: Any, first: int, end: int, *, step: int) -> None:
        """Read the tokens of positions first..end-1, `step` at a time; `tokens[end]` is kept for the next run.

        The bytes of these rows leave the backlog. Nothing happens for a cache without caches of the small model.
        """
        if not cache.heads:
            return
        for lo in range(first, end, step):
            hi = min(lo + step, end)
            seek(cache.heads, lo, lo)
            self.small.hidden(self._known(tokens[lo:hi]), cache.heads)
            cache.primed = hi
        if end == 0:
            self._begin(cache)
        waiting = mx.concatenate(cache.backlog, axis=1) if cache.backlog else mx.zeros((1, 0, 1), mx.uint8)
        cache.backlog = [waiting[:, end - first :]]
        cache.kept = [self._known(tokens[end : end + 1])[:, None]]

    def _known(self, tokens: Any) -> mx.array:
        """Return tokens as an array [1, L]; ids that the small model lacks become its last id."""
        return mx.array(np.minimum(tokens, self.small.vocab_size - 1), mx.int32)[None]

    def _begin(self, cache: PromptCache) -> None:
        """Give empty recurrent states their arrays, of zeros: a pool concatenates those of its sequences."""
        if all(c.parts for c in cache.heads if c.is_state):
            return
        seek(cache.heads, 0, 0)
        self.small.hidden(self._known([0]), cache.heads)
        for c in cache.heads:
            if c.is_state:
                c.parts = tuple(mx.zeros_like(part) for part in c.parts)
        seek(cache.heads, 0, 0)


class SmallModelOutput(NamedTuple):
    """The small model's output for each sequence's next token, [n, 1, H]."""

    drafter: SmallModel
    rows: mx.array

    def likeliest(self) -> mx.array:
        return mx.argmax(self.logits(), axis=-1, keepdims=True).astype(mx.int32)

    def choice(self) -> None:
        """Return None: its LM head has no kernel."""

    def logits(self) -> mx.array:
        return self.drafter.logits(self.rows)[:, 0]


class SmallModelPaths:
    """The paths of a tree that the small model reads, in copies of its caches: each level adds a row to these."""

    def __init__(self, drafter: SmallModel, caches: list[Any]):
        self.drafter, self.caches = drafter, caches

    def read(self, tokens: mx.array, index: mx.array) -> SmallModelOutput:
        self.caches = branched(self.caches, index, self.caches[0].offset, 1)
        return SmallModelOutput(self.drafter, self.drafter.outputs(tokens, self.caches))
