"""Call a caller's own processors and samplers, which take one row at a time, for the rows of their own sequence."""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx

from ..kernels import KernelRefused, masked
from .masks import Masks
from .members import Member, Members
from .sampling import key_at, random_state

Logprobs = tuple[mx.array | None, ...] | None


def processed(logits: mx.array, members: Members, drafts: mx.array | None, masks: Masks) -> mx.array:
    """Return logits [n, R, V] after the callers' processors and then the masks of the sequences that have such.

    drafts: int32 [n, R-1], None if R = 1; row i of a sequence is preceded by its history and its first i drafts.
    """
    each: list[mx.array] = [*mx.split(logits, len(members))]
    for i, member in _present(members):
        if not member.picker.callers:
            continue
        past = mx.array(member.history.tokens, mx.int32)
        own = past if drafts is None else mx.concatenate([past, drafts[i]])
        rows = _tried(member, _processed_rows, member.picker.callers, each[i][0], own, len(past))
        if rows is not None:
            each[i] = masked(rows, None if masks is None else masks[i])[None]
    return mx.concatenate(each)


def _processed_rows(callers: Any, logits: mx.array, tokens: mx.array, first: int) -> mx.array:
    rows: list[mx.array] = [*mx.split(logits, len(logits))]
    for i, row in enumerate(rows):
        for process in callers:
            row = process(tokens[: first + i], row)
        rows[i] = row
    return mx.concatenate(rows)


def with_logprobs(
    tokens: mx.array, logits: mx.array, members: Members, position: mx.array
) -> tuple[mx.array, Logprobs]:
    """Return tokens [n, R], of a sequence's own sampler if it has one, and logprobs: per sequence [R, V] or None.

    position: of each sequence's first token, int32 [n], or of each of its tokens, int32 [n, R].
    """
    each: list[mx.array] = [*mx.split(tokens, len(members))]
    found = list[mx.array | None]([None] * len(members))
    for i, member in _present(members):
        picker = member.picker
        if not (picker.sampler or picker.logprobs):
            continue
        logprobs = logits[i] - mx.logsumexp(logits[i], axis=-1, keepdims=True)
        found[i] = logprobs if picker.logprobs else None
        if picker.sampler:
            drawn = _tried(member, _sampled_rows, picker.sampler, logprobs, picker.key, position[i : i + 1])
            each[i] = each[i] if drawn is None else drawn[None]
    return mx.concatenate(each), tuple(found) if any(row is not None for row in found) else None


def _sampled_rows(sampler: Any, logprobs: mx.array, key: mx.array, position: mx.array) -> mx.array:
    tokens = []
    for i, row in enumerate(mx.split(logprobs, len(logprobs))):
        with random_state(key_at(key, position[:, i] if position.ndim > 1 else position + i)):
            tokens.append(sampler(row).reshape(1))
    return mx.concatenate(tokens).astype(mx.int32)


def _present(members: Members) -> Iterator[tuple[int, Member]]:
    return ((i, member) for i, member in enumerate(members) if member is not None)


def _tried(member: Member, function: Callable[..., mx.array], *arguments: Any) -> mx.array | None:
    """Return the function's result; None after an error of a caller's code, which goes to the member's `fail`."""
    try:
        return function(*arguments)
    except KernelRefused:
        raise
    except Exception as e:
        member.fail(e)
        return None
