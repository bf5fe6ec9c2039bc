"""Define what a picture's rows in a prompt have instead of a token's embedding and a text row's position."""

from typing import NamedTuple

import mlx.core as mx


class PromptRows(NamedTuple):
    """Embeddings [1, L, H] (None: the tokens'), and RoPE positions on three axes, int32 [3, L] (None: text's)."""

    embeddings: mx.array | None = None
    positions: mx.array | None = None


NO_ROWS = PromptRows()
