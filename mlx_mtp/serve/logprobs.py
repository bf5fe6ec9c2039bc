"""Look up log probabilities of tokens, with the text and the bytes of each token."""

from typing import Any

import mlx.core as mx
import numpy as np

from ..generate import GenerationResponse
from .answer import TokenLogprob
from .token_rules import BYTE, BYTES


def token_logprob(tokenizer: Any, response: GenerationResponse, count: int | None) -> TokenLogprob | None:
    """Return log probabilities of a response's token and of the `count` most likely ones, the likeliest first.

    With count 0 only the token's own; None if count is None or the response has no log probabilities.
    """
    if count is None or response.logprobs is None:
        return None
    logprobs = np.array(response.logprobs.astype(mx.float32))
    top = np.argsort(-logprobs, kind="stable")[:count].tolist()
    chosen, *others = (_token(tokenizer, token, float(logprobs[token])) for token in (response.token, *top))
    return TokenLogprob(chosen, tuple(others))


def _token(tokenizer: Any, token: int, logprob: float) -> tuple[str, bytes, float]:
    """Return a token's text, its bytes and its log probability, which is at least -9999: JSON has no infinity."""
    text = tokenizer.decode([token])
    return text, _bytes(tokenizer, token, text), max(logprob, -9999.0)


def _bytes(tokenizer: Any, token: int, text: str) -> bytes:
    """Return the bytes of a token: of its text, or of its vocabulary entry if it is part of a character."""
    piece = tokenizer.convert_ids_to_tokens(token) if "\ufffd" in text else ""
    if BYTE.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    if piece and BYTES.keys() >= set(piece):
        return bytes(BYTES[letter] for letter in piece)
    return text.encode("utf-8", "replace")
