"""Choose the target's tokens of n sequences, each independently of the others."""

from typing import Any

import mlx.core as mx

from ..kernels import KernelRefused
from ..layers.target import Target
from .masks import Masks
from .members import Members

Logprobs = tuple[mx.array | None, ...] | None


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
    n, rows = hidden.shape[:2]
    masks = masks or [None] * n
    own = {i: member for i, member in enumerate(members) if member is not None}
    sampled = {i: member for i, member in own.items() if masks[i] is not None or not member.picker.plain}
    if not sampled:
        return likeliest(model, hidden), None
    logits = model.logits(hidden) if n > 1 and model.choice(hidden) is None else None
    each: Any = [mx.zeros((1, rows), mx.int32)] * n if len(sampled) == n else None
    each = each or mx.split(likeliest(model, hidden, logits), n)
    found: list[mx.array | None] = [None] * n
    for i, member in sampled.items():
        draft = mx.array([], mx.int32) if drafts is None else drafts[i]
        at, choose = position if n == 1 else position[i : i + 1], member.picker.pick
        try:
            if logits is None:
                tokens, found[i] = choose(model, hidden[i : i + 1], at, member.history.tokens, draft, masks[i])
            else:
                tokens, found[i] = member.picker(logits[i], at, member.history.tokens, draft, masks[i])
        except KernelRefused:
            raise
        except Exception as e:  # raised by the user's sampler or processor; this sequence's row is not used
            member.fail(e)
            continue
        each[i] = tokens[None]
    logprobs = tuple(found) if any(row is not None for row in found) else None
    return mx.concatenate(each) if n > 1 else each[0], logprobs


def likeliest(model: Target, hidden: mx.array, logits: mx.array | None = None) -> mx.array:
    """Return the likeliest tokens [n, R] after hidden rows [n, R, H]; logits: those of these rows, if computed."""
    choice = model.choice(hidden) if logits is None else None
    if choice is not None:
        return choice.greedy().reshape(hidden.shape[:2])
    return mx.argmax(model.logits(hidden) if logits is None else logits, axis=-1).astype(mx.int32)
