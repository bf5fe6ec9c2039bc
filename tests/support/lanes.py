"""Give a model a lane, and let its rows depend on it, so that a row of another lane changes a text."""

import contextlib

import pytest

LANES = ("exact", "matrix")


@contextlib.contextmanager
def lanes_apart(*models):
    """Let models of one type read the next token id instead of each token in the lane "matrix"; restore all."""
    hidden, before = type(models[0]).hidden, [model.runtime.lane for model in models]

    def in_lane(self, tokens, *more):
        return hidden(self, (tokens + (self.runtime.lane == "matrix")) % self.vocab_size, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(models[0]), "hidden", in_lane)
        try:
            yield
        finally:
            for model, lane in zip(models, before, strict=True):
                model.runtime.lane = lane
