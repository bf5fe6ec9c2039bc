"""Read the paths of a draft tree with MTP heads, in copies of their caches."""

import mlx.core as mx

from ..cache.beams import branched, of_texts
from ..cache.step_cache import StepCache
from ..layers.target import Target
from .draft_sampling import HeadOutput


class RecycledPaths:
    """The paths of one recycled head, which reads its own output: each level adds a row to the copies."""

    def __init__(self, model: Target, cache: StepCache, row: mx.array):
        """row: the head's output row for the first draft, [n, 1, H]; its caches are at the next position."""
        self.model, self.caches, (self.head,) = model, cache.heads, model.mtp
        self.hidden = self.head.feedback(row, row)

    def read(self, tokens: mx.array, index: mx.array) -> HeadOutput:
        self.caches = branched(self.caches, index, self.caches[0].offset, 1)
        hidden = of_texts(self.hidden, index)
        row = self.head(self.model.embed(tokens, 0), hidden, *self.caches)
        self.hidden = self.head.feedback(row, row)
        return HeadOutput(self.model, 0, row)


class ChainedPaths:
    """The paths of heads of which one drafts each level: it reads all rows of a path, as the other heads' outputs."""

    def __init__(self, model: Target, cache: StepCache):
        """The heads' caches are behind the accepted rows, whose last feedback, but the last head's, is in `kept`."""
        self.model, self.heads, self.kept = model, cache.heads, cache.kept
        n, _, width = cache.kept[0].shape if cache.kept else (1, 1, 1)
        self.tokens, self.hidden = mx.zeros((n, 0), mx.int32), mx.zeros((n, 0, width))

    def read(self, tokens: mx.array, index: mx.array) -> HeadOutput:
        depth = self.tokens.shape[1] + 1
        head, kv, kept = self.model.mtp[depth], self.heads[depth], self.kept[depth - 1]
        sequence = mx.repeat(mx.arange(len(kept)), index.size // len(kept))
        copies = branched([kv], sequence, kv.offset, depth)
        self.tokens = mx.concatenate([of_texts(self.tokens, index), tokens], axis=1)
        hidden = mx.concatenate([of_texts(kept, sequence), of_texts(self.hidden, index)], axis=1)
        rows = head(self.model.embed(self.tokens, depth), hidden, *copies)
        self.hidden = head.feedback(rows, hidden)
        return HeadOutput(self.model, depth, rows[:, -1:])
