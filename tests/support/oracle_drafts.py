"""A drafter without caches for tests: it drafts a text that is given, wrong at given places."""

import mlx.core as mx

from mlx_mtp.decoding.drafters.drafter import Drafter
from mlx_mtp.decoding.run import NO_DRAFTS, Drafts


class OracleDrafts(Drafter):
    """Drafts `truth`, the text from its first token on, but another token at the positions in `wrong`."""

    most = 15
    windows = ()
    reads_hidden = False

    def __init__(self, model, truth: list[int], wrong: set[int]):
        drafts = [(token + 1) % model.vocab_size if i in wrong else token for i, token in enumerate(truth)]
        self.drafts = mx.array(drafts + [0] * 64, mx.int32)

    def propose(self, frame, run, k):
        at = frame.cache.layers[0].offset[:, None] + 1 + mx.arange(k)
        return Drafts(mx.take(self.drafts, at)) if k else NO_DRAFTS
