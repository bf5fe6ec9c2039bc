"""Define what rows of pictures in a prompt have instead of a token's embedding and position."""

from typing import NamedTuple

import mlx.core as mx


class PromptRows(NamedTuple):
    """Embeddings [1, L, H] instead of those of the tokens, and positions on three axes, int32 [3, L]; or None."""

    embeddings: mx.array | None = None
    positions: mx.array | None = None


NO_ROWS = PromptRows()
