"""Choose the target's tokens of n sequences, all rows at once, each sequence independently of the others.

An LM head's kernel chooses without writing logits where it can. Else logits are written once, rules and masks change
them in one launch, and another one chooses. Only a caller's own functions run row by row, for their own sequence.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..kernels import choose_rows
from ..layers.target import Target
from .callers import Logprobs, processed, with_logprobs
from .logit_rules import changed
from .masks import Masks, stacked
from .members import Members
from .sampling import Picker

FREE = Picker()  # of a free slot


def pick(
    model: Target,
    hidden: mx.array,
    position: Any,
    drafts: mx.array | None,
    members: Members,
    masks: Masks = (),
) -> tuple[mx.array, Logprobs]:
    """Return the tokens [n, R] chosen after hidden rows [n, R, H], and logprobs: per sequence [R, V] or None.

    position: of each sequence's first token, int32 [n], or an int if n = 1. drafts: [n, R-1], None if R = 1. masks:
    (): no sequence has a grammar. An error of a sequence's own sampler or processor goes to its `fail`.
    """
    masks = masks or [None] * len(members)
    pickers = [FREE if member is None else member.picker for member in members]
    if (tokens := by_head(model, hidden, position, pickers, masks)) is not None:
        return tokens, None
    histories = [None if member is None else member.history.tokens for member in members]
    early = [None if picker.callers else mask for picker, mask in zip(pickers, masks, strict=True)]
    logits = changed(model.logits(hidden), [picker.rules for picker in pickers], histories, drafts, early)
    at = mx.array(position).reshape(-1)
    if any(picker.callers for picker in pickers):
        logits = processed(logits, members, drafts, masks)
    if all(picker.options.greedy for picker in pickers):
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
    else:
        keys = mx.stack([picker.key for picker in pickers])
        tokens = choose_rows(logits, [picker.options for picker in pickers], keys, at)
    if not any(picker.sampler or picker.logprobs for picker in pickers):
        return tokens, None
    return with_logprobs(tokens, logits, members, at)


def by_head(
    model: Target, hidden: mx.array, position: Any, pickers: Sequence[Picker], masks: Masks
) -> mx.array | None:
    """Return the tokens [n, R] that a kernel of the LM head chooses without writing logits; None if it cannot."""
    greedy = all(picker.options.greedy for picker in pickers)
    if not all(picker.by_head for picker in pickers) or not (greedy or len(pickers) == 1):
        return None
    rows = model.choice(hidden)
    if rows is None:
        return None
    mask = stacked(masks, hidden.shape[1])
    tokens = rows.greedy(mask) if greedy else rows.draw(pickers[0].key, position, pickers[0].options.temp, mask)
    return tokens.reshape(hidden.shape[:2])
