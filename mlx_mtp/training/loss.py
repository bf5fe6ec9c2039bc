"""Compute the loss of drafts by the target's most likely tokens and its probabilities of the tokens drafted."""

from typing import Any

import mlx.core as mx

from ..layers.lm_head import logits_of
from .batches import Batch
from .chain import chain

LATER = 0.7  # weight of a depth's loss relative to the depth before


def chain_loss(
    heads: Any,
    *batch: mx.array,
    model: Any,
    teacher: Any,
    ranks: mx.array,
    depths: int,
    checkpoint: bool = False,
    noise: float = 0.0,
) -> tuple[mx.array, mx.array]:
    """Return (the loss, a scalar; by depth, [2, depths], the share of right drafts and the mean loss in nats).

    A draft is right if it is the target's most likely token. The loss is the mean over depths of the mean `imitation`
    loss, with weights LATER ** depth; a mean over no positions is 0. Positions that are not `counted`, and those
    whose draft depends on another document, are left out. heads: module whose list `mtp` contains the heads of
    `model.mtp`; it is not used. batch: the fields of `Batch`. teacher: the target's LM head over the tokens that are
    drafted. ranks: int32 [V], each token's index in the heads' LM head, -1 for tokens that are not drafted: positions
    where the target chooses such a token have no loss, and count as wrong. depths: drafts of a cycle. checkpoint: as
    in `chain`. noise: `share` of `noisy`.
    """
    del heads  # its parameters are those of model.mtp
    given = Batch(*batch)
    hidden = given.hidden.astype(model.no_hidden().dtype)
    labels, inside = ranks[given.choices[:, 1:]], given.starts[:, 1:] == given.starts[:, :-1]
    rows = noisy(model.capture(hidden[:, :-1]), given.keys[0], noise)
    outputs = chain(model, rows, given.tokens[:, 1:], given.starts[:, :-1], depths, checkpoint=checkpoint)
    theirs = flat(logits_of(teacher, model.normed(hidden[:, 1:])))
    place = mx.arange(labels.shape[1])
    losses, right = [], []
    for depth, output in enumerate(outputs):
        asked = inside & (place - depth >= given.starts[:, :-1]) & given.counted[:, 1:]
        used = asked & (labels >= 0)
        logits = flat(model.draft_logits(min(depth, len(model.mtp) - 1), output))
        each = imitation(logits, mx.maximum(labels, 0).reshape(-1), theirs).reshape(labels.shape)
        losses.append((each * used).sum() / mx.maximum(used.sum(), 1))
        hits = (mx.stop_gradient(logits).argmax(axis=-1).reshape(labels.shape) == labels) & asked
        right.append(hits.sum() / mx.maximum(asked.sum(), 1))
    stacked = mx.stack(losses)
    weights = LATER ** mx.arange(depths)
    return (stacked * weights).sum() / weights.sum(), mx.stack([mx.stack(right), mx.stop_gradient(stacked)])


def imitation(logits: mx.array, targets: mx.array, teacher: mx.array) -> mx.array:
    """Return the cross entropy in nats [N] of logits [N, V] and a mixture, in halves, of two distributions.

    targets: token indices [N]: all probability at these. teacher: logits [N, V]: their softmax.
    """
    chosen = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    theirs = (logits * mx.softmax(teacher, axis=-1)).sum(axis=-1)
    return mx.logsumexp(logits, axis=-1) - (chosen + theirs) / 2


def flat(logits: mx.array) -> mx.array:
    """Return logits [B, L, n] as float32 [B * L, n]."""
    return logits.astype(mx.float32).reshape(-1, logits.shape[-1])


def noisy(rows: mx.array, key: mx.array, share: float) -> mx.array:
    """Return rows [..., H] plus normal noise, whose deviation is `share` of each row's root mean square.

    As in EAGLE (arXiv 2401.15077). share 0 returns the rows themselves.
    """
    if not share:
        return rows
    size = mx.sqrt((rows.astype(mx.float32) ** 2).mean(axis=-1, keepdims=True))
    return rows + (share * size * mx.random.normal(rows.shape, key=key)).astype(rows.dtype)
