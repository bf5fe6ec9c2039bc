"""Choose the target's tokens of n sequences, all rows at once, each sequence independently of the others.

An LM head's kernel chooses without writing logits where it can. Else logits are written once, rules and masks change
them in one launch, and another one chooses. Only a caller's own functions run row by row, for their own sequence.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..cache.tree import RowTree
from ..kernels import choose_rows
from ..layers.target import Target
from .callers import Logprobs, processed, with_logprobs
from .logit_rules import changed
from .masks import Masks, without
from .members import Members
from .sampling import Picker, keys_of

FREE = Picker()  # of a free slot


def pick(
    model: Target,
    hidden: mx.array,
    position: Any,
    drafts: mx.array | None,
    members: Members,
    masks: Masks = None,
    tree: RowTree | None = None,
) -> tuple[mx.array, Logprobs]:
    """Return the tokens [n, R] chosen after hidden rows [n, R, H], and logprobs: per sequence [R, V] or None.

    position: of each sequence's first token, int32 [n], or an int if n = 1. drafts: [n, R-1], None if R = 1. An error
    of a sequence's own sampler or processor goes to its `fail`. tree: of the rows, None for a chain; callers'
    processors exclude trees.
    """
    fused = model.runtime.choosing
    pickers = [FREE if member is None else member.picker for member in members]
    if (tokens := by_head(model, hidden, position, pickers, masks, chain=tree is None)) is not None:
        return tokens, None
    rules, histories = [p.rules for p in pickers], [None if m is None else m.history.tokens for m in members]
    first = without(masks, [bool(p.callers) for p in pickers])
    logits = changed(model.logits(hidden), rules, histories, drafts, first, tree, fused=fused)
    if any(p.callers for p in pickers):
        assert tree is None, "a caller's processor reads the tokens of one path"
        logits = processed(logits, members, drafts, masks)
    at = mx.array(position).reshape(-1)
    if tree is not None:
        at = at[:, None] + tree.depth
    if all(p.options.greedy for p in pickers):
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
    else:
        tokens = choose_rows(logits, [p.options for p in pickers], keys_of(pickers), at, fused=fused)
    if not any(p.sampler or p.logprobs for p in pickers):
        return tokens, None
    return with_logprobs(tokens, logits, members, at)


def by_head(
    model: Target, hidden: mx.array, position: Any, pickers: Sequence[Picker], masks: Masks, *, chain: bool
) -> Any:
    """Return the tokens [n, R] that a kernel of the LM head chooses without writing logits; None if it cannot.

    chain: the rows' positions are consecutive, which a draw requires.
    """
    greedy = all(p.options.greedy for p in pickers)
    able = all(p.by_head for p in pickers) and (greedy or (chain and len(pickers) == 1))
    if not able or (rows := model.choice(hidden)) is None:
        return None
    mask, own = None if masks is None else masks.flatten(0, 1), pickers[0]
    tokens = rows.greedy(mask) if greedy else rows.draw(own.key, position, own.options.temp, mask)
    return tokens.reshape(hidden.shape[:2])
