"""Drafters for tests: drafts that a test chooses, and a record of the heads' drafts."""

import mlx.core as mx

from mlx_mtp.decoding.drafters.heads import Heads
from mlx_mtp.decoding.run import NO_DRAFTS, Drafts


class Oracle(Heads):
    """Drafts the true continuation, but wrong at the positions in `wrong`; the heads' caches move as always."""

    def __init__(self, model, truth: list[int], wrong: set[int]):
        super().__init__(model)
        drafts = [(t + 1) % model.vocab_size if i in wrong else t for i, t in enumerate(truth)]
        self.drafts = mx.array(drafts + [0] * 64, mx.int32)

    def propose(self, frame, run, k):
        super().propose(frame, run, k)
        at = frame.cache.layers[0].offset[:, None] + 1 + mx.arange(k)
        return Drafts(mx.take(self.drafts, at)) if k else NO_DRAFTS


class Spy(Heads):
    """Records (the target's positions on the device, members, drafts, cache) of each draft of the heads."""

    def __init__(self, monkeypatch, model):
        super().__init__(model)
        self.calls: list = []
        monkeypatch.setattr(model, "drafter", self)

    def propose(self, frame, run, k):
        drafts = super().propose(frame, run, k)
        if k:
            self.calls.append((frame.cache.layers[0].offset, [*frame.members], drafts.tokens, frame.cache))
        return drafts

    def drafts(self, text: list[int]) -> list[tuple[int, list[int]]]:
        """Return (number of tokens before, drafts) of the submitted cycles' calls. text: prompt and answer."""
        found = [(offset.item() + 1, tokens.tolist()[0]) for offset, _, tokens, _ in self.calls]
        return [(known, drafts) for known, drafts in found if known <= len(text)]
