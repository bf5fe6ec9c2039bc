"""Make the masks of allowed tokens of a cycle's rows."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..grammar import Matcher

Masks = mx.array | None  # int32 [n, R, words] of R rows of n sequences; None if no sequence has a grammar


def mask_row(matcher: Matcher | None, tokens: Any) -> Masks:
    """Return the mask of the token after `tokens`, int32 [1, 1, words]; None without a matcher.

    tokens: all of the sequence, which the matcher follows. GrammarError as of `Matcher.follow` and `Matcher.fill`.
    """
    if matcher is None:
        return None
    matcher.follow(tokens)
    rows = np.empty((1, 1, matcher.words), np.int32)
    matcher.fill(rows[0])
    return mx.array(rows)


def without(masks: Masks, skipped: Sequence[bool]) -> Masks:
    """Return masks that allow all tokens of the sequences `skipped`; None if these are all sequences."""
    if masks is None or not any(skipped):
        return masks
    return None if all(skipped) else masks | mx.array([[[-skip]] for skip in skipped], mx.int32)
