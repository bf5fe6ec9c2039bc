"""Make the masks of allowed tokens of a cycle's rows, and apply them to logits."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..grammar import Matcher

Masks = Sequence[mx.array | None]  # per sequence, int32 [R, words] of its R rows; None without a grammar


def mask_rows(matcher: Matcher | None, tokens: Any, drafts: Sequence[int] = ()) -> mx.array | None:
    """Return the masks after all tokens of a sequence and after each of k drafts, int32 [k + 1, words].

    None without a matcher. Rows after a forbidden draft or the answer's end allow all tokens; these are not yielded.
    Raises GrammarError.
    """
    if matcher is None:
        return None
    matcher.follow(tokens)
    rows = np.full((len(drafts) + 1, matcher.words), -1, np.int32)
    matcher.fill(rows, drafts)
    return mx.array(rows)


def masked(logits: mx.array, mask: mx.array) -> mx.array:
    """Return logits [M, V], -infinity for the tokens that a mask, int32 [M, words], forbids."""
    bits = (mask[:, :, None] >> mx.arange(32, dtype=mx.int32)) & 1
    allowed = bits.reshape(len(mask), -1)[:, : logits.shape[-1]]
    return mx.where(allowed.astype(mx.bool_), logits, -mx.inf)
