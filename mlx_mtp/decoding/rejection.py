"""Draw tokens: by noise that belongs to the tokens, or by keeping or replacing a draft.

Rejection sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318): a draft d ~ q is kept with
probability min(1, p(d) / q(d)), else a token is drawn from max(p - q, 0), normalised; the outcome has distribution p.
It keeps the most drafts that any rule can, 1 - TV(p, q), but with a seed the text depends on what was drafted.
"""

import mlx.core as mx


def gumbel_max(scores: mx.array, key: mx.array) -> mx.array:
    """Draw a token, int32 [1], from softmax(scores [1, V]).

    A token's noise depends on the key alone, so that rows with like probabilities mostly give the same token, at
    least as often as (1 - TV) / (1 + TV) (Daliri, Musco and Suresh, arXiv 2408.07978). Kernels draw with the same
    noise; mx.random.categorical, by one number and a sum over the tokens in order, has no such bound.
    """
    noise = mx.random.gumbel(scores.shape, key=key)
    return mx.argmax(scores.astype(mx.float32) + noise, axis=-1).astype(mx.int32)


def draft_key(dice: mx.array) -> mx.array:
    """Derive a draft's key from that of its position's own draw, `dice`; independent of what verifies it."""
    return mx.random.split(dice, 3)[0]


def keep_or_replace(scores: mx.array, q: mx.array, draft: mx.array, dice: mx.array) -> mx.array:
    """Keep the draft [1], drawn from q [1, V], or replace it: int32 [1], distributed as softmax(scores).

    scores: [1, V], the target's, filtered. dice: the key of this position's draw. A replacement is another token.
    """
    _, coin, other = mx.random.split(dice, 3)
    p = mx.softmax(scores, axis=-1)
    kept = mx.random.bernoulli(mx.minimum(1.0, (p / q)[:, draft[0]]), key=coin)
    left = mx.maximum(p - q, 0.0)
    # Nothing is left where p equals q, up to rounding; no draft is refused there.
    left = mx.where(left.sum() > 0, left, p)
    return mx.where(kept, draft, gumbel_max(mx.log(left), other))
