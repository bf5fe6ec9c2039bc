"""Make the masks of allowed tokens of a cycle's rows."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..grammar import Matcher

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


def stacked(masks: Masks, rows: int) -> mx.array | None:
    """Return the masks of n sequences of R rows, int32 [n * R, words], None as all tokens; None without any."""
    some = next((mask for mask in masks if mask is not None), None)
    if some is None:
        return None
    if len(masks) == 1:
        return some
    return mx.concatenate([mx.full((rows, some.shape[-1]), -1, mx.int32) if mask is None else mask for mask in masks])
