"""Count how many drafts equal what the target itself chose."""

import mlx.core as mx


def accept(drafts: mx.array, tokens: mx.array) -> mx.array:
    """Return the length of the longest prefix of drafts [..., k] that equals tokens [..., k+1], int32 [...].

    `tokens[..., i]` is drawn from the target with the user's own sampler, after the drafts before it. Keeping
    drafts while they equal the draw and ending with the draw that differs (or the bonus token) outputs exactly
    the target's draws, so this is exact for any sampler. For greedy drafts the probability of keeping one is
    p(draft), that of rejection sampling (Leviathan et al., arXiv 2211.17192, with q a point mass).
    """
    matches = tokens[..., : drafts.shape[-1]] == drafts
    return mx.cumprod(matches.astype(mx.int32), axis=-1).sum(axis=-1)
