"""Count how many drafts equal what the target itself chose."""

import mlx.core as mx


def accept(drafts: mx.array, tokens: mx.array) -> mx.array:
    """Return the length, int32 [1], of the longest prefix of drafts [k] that equals tokens [k+1].

    `tokens[i]` is drawn from the target with the user's own sampler, after the drafts before it. Keeping
    drafts while they equal the draw and ending with the draw that differs (or the bonus token) outputs exactly
    the target's draws, so this is exact for any sampler. For greedy drafts the probability of keeping one is
    p(draft), that of rejection sampling (Leviathan et al., arXiv 2211.17192, with q a point mass).
    """
    matches = tokens[: drafts.size] == drafts
    return mx.cumprod(matches.astype(mx.int32)).sum(keepdims=True)
