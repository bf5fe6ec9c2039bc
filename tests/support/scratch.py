"""Recompute drafts from scratch: the target's rows and the heads' over all positions, with no cache."""

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask


def target_rows(plain, tokens: list[int]) -> tuple[mx.array, mx.array]:
    """Return the target's rows before and after the final norm [1, T, H], without a cache."""
    inner, name = (plain.backbone, "norm_f") if "backbone" in plain else (plain.model, "norm")
    rows, norm = [], getattr(inner, name)
    setattr(inner, name, lambda x: rows.append(x) or norm(x))
    after = inner(mx.array(tokens)[None])
    setattr(inner, name, norm)
    return rows[0], after


def head_rows(model, depth: int, tokens: list[int], hidden: mx.array) -> mx.array:
    """Return the rows [1, n, H] of one head over all its slots, without a cache; one token per row of `hidden`."""
    head, window = model.mtp[depth], model.head_windows()[depth]
    e, h = head.enorm(model.embed(mx.array(tokens)[None], depth)), head.hnorm(hidden)
    x = head.eh_proj(mx.concatenate([e, h] if model.spec.fuse == "eh" else [h, e], axis=-1))
    return head.block(x, create_causal_mask(x.shape[1], window_size=window), None)


def drafts_from_scratch(model, plain, tokens: list[int], k: int, rows=None) -> list[int]:
    """Return k drafts after tokens x_0..x_{T-1}, of which the target has read all but the last.

    rows: `target_rows` of a longer text that begins with these tokens.
    """
    drafts: list[int] = []
    for logits in logits_along(model, plain, tokens, drafts, k, rows):
        drafts.append(mx.argmax(logits).item())
    return drafts


def logits_along(model, plain, tokens: list[int], drafts: list[int], k: int, rows=None, heads: int = 99):
    """Yield the logits [V] of k drafts after tokens, each after those that `drafts` has by then.

    heads: number of the first heads that draft; the last one drafts all tokens behind its own by its own output.
    """
    before, after = (part[:, : len(tokens) - 1] for part in rows or target_rows(plain, tokens[:-1]))
    hidden = before if model.spec.capture == "pre" else after
    last = 0 if model.spec.topology == "recycle" else min(heads, len(model.mtp)) - 1
    for j in range(k):
        depth = min(j, last)
        rows = head_rows(model, depth, (tokens + drafts)[1 + depth :][: hidden.shape[1]], hidden)
        yield model.draft_logits(depth, rows[:, -1:])[0, 0]
        feedback = rows if model.spec.feedback == "pre" else model.mtp[depth].norm(rows)
        feedback = hidden if model.spec.topology == "target_each" else feedback
        hidden = feedback if j < last else mx.concatenate([hidden, feedback[:, -1:]], axis=1)
