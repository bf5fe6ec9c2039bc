"""Measure how often a small model that drafts predicts the target's token on given texts."""

import mlx.core as mx

from ..cache.kinds import make_caches
from ..decoding.drafters.small_model import SmallModel
from .heads import Known
from .rounding_judge import greedy


def right_small(drafter: SmallModel, text: Known) -> list[mx.array]:
    """Return, as `heads.right`, a list of one array: whether each prediction is right, boolean [L - 1].

    The predictions are evaluated, their comparison is not.
    """
    caches = make_caches(list(drafter.windows), starts=[0] * len(drafter.windows))
    rows = drafter.outputs(text.tokens[None], caches)
    return [greedy(drafter.logits, rows)[1:] == text.predicted[1:]]
