"""Choose the target's tokens of n sequences, each as it does alone."""

from typing import Any

import mlx.core as mx

from ..kernels import KernelRefused
from ..layers.target import Target
from .members import Members

Logprobs = tuple[mx.array | None, ...] | None


def pick(
    model: Target, hidden: mx.array, position: Any, drafts: mx.array | None, members: Members
) -> tuple[mx.array, Logprobs]:
    """Choose tokens [n, R] of hidden rows [n, R, H]; and of each sequence that asks for them its logprobs [R, V].

    position: of each sequence's first token, int32 [n], or the only one's int. drafts: [n, R-1], None for R = 1.
    """
    n, rows = hidden.shape[:2]
    own = {i: member for i, member in enumerate(members) if member is not None and not member.picker.plain}
    if not own:
        return likeliest(model, hidden), None
    logits = model.logits(hidden) if n > 1 and model.choice(hidden) is None else None
    each: Any = [mx.zeros((1, rows), mx.int32)] * n if len(own) == n else None
    each = each or mx.split(likeliest(model, hidden, logits), n)
    found: list[mx.array | None] = [None] * n
    for i, member in own.items():
        guesses = mx.array([], mx.int32) if drafts is None else drafts[i]
        at = position if n == 1 else position[i : i + 1]
        try:
            if logits is None:
                tokens, found[i] = member.picker.pick(model, hidden[i : i + 1], at, member.text.tokens, guesses)
            else:
                tokens, found[i] = member.picker(logits[i], at, member.text.tokens, guesses)
        except KernelRefused:
            raise
        except Exception as e:  # of a user's own sampler or processor; nobody sees this sequence's row
            member.fail(e)
            continue
        each[i] = tokens[None]
    logprobs = tuple(found) if any(row is not None for row in found) else None
    return mx.concatenate(each) if n > 1 else each[0], logprobs


def likeliest(model: Target, hidden: mx.array, logits: mx.array | None = None) -> mx.array:
    """Choose the likeliest tokens [n, R] of hidden rows [n, R, H], whose logits may be there already."""
    choice = model.choice(hidden) if logits is None else None
    if choice is not None:
        return choice.greedy().reshape(hidden.shape[:2])
    return mx.argmax(model.logits(hidden) if logits is None else logits, axis=-1).astype(mx.int32)
