"""Make drafts of a test's choosing, through the real drafting call."""

import mlx.core as mx

from mlx_mtp.decoding import step as one_step
from mlx_mtp.decoding.draft import Drafts

real = one_step.draft


class Oracle:
    """Drafts the true continuation, but wrong at the positions in `wrong`; stands in for `step.draft`."""

    def __init__(self, truth: list[int], wrong: set[int], vocab: int):
        drafts = [(t + 1) % vocab if i in wrong else t for i, t in enumerate(truth)]
        self.drafts = mx.array(drafts + [0] * 64, mx.int32)

    def __call__(self, model, cache, run, k, chooser):
        real(model, cache, run, k, chooser)  # the heads' caches move as they always do
        return Drafts(mx.take(self.drafts, cache.layers[0].offset + 1 + mx.arange(k)))
