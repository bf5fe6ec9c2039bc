"""Make the masks of allowed tokens of a cycle's rows, and apply them to logits."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..grammar import Matcher
from ..kernels import bits

Masks = Sequence[mx.array | None]  # per sequence, int32 [R, words] of its R rows; None without a grammar


def mask_row(matcher: Matcher | None, tokens: Any) -> mx.array | None:
    """Return the mask of the token after `tokens`, int32 [1, words]; None without a matcher.

    tokens: all of the sequence, which the matcher follows. GrammarError as of `Matcher.follow` and `Matcher.fill`.
    """
    if matcher is None:
        return None
    matcher.follow(tokens)
    rows = np.empty((1, matcher.words), np.int32)
    matcher.fill(rows)
    return mx.array(rows)


def masked(logits: mx.array, mask: mx.array) -> mx.array:
    """Return logits [M, V], -infinity for the tokens that a mask, int32 [M, words], forbids."""
    return mx.where(bits(mask, logits.shape[-1]), logits, -mx.inf)
