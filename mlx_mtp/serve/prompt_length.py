"""Detect a prompt that is too long for the context before it is rendered and tokenized whole."""

from collections.abc import Iterable
from typing import Any

from .departure import check_client

PIECE = 1 << 14  # characters that are tokenized at once; tokenizers need up to 500 bytes for each
EXCESS = 1.25  # pieces have more tokens together than the whole text, by less than this factor


class TooLong(Exception):
    """Raised for a prompt of at least `tokens` tokens, which exceed the context.

    No ValueError, after which other forms of the conversation would be rendered.
    """

    def __init__(self, tokens: int):
        super().__init__(f"at least {tokens} tokens")


def check_length(tokenizer: Any, texts: Iterable[str], positions: int, others: int = 0) -> None:
    """Raise TooLong if texts have more than EXCESS times `positions` tokens, counted in pieces until that is certain.

    Texts of less than a piece together are not counted. others: number of further tokens. Raises ClientDisconnect as
    `check_client`.
    """
    texts, tokens = [*texts], others
    if sum(map(len, texts)) + others < PIECE:
        return
    for text in texts:
        for start in range(0, len(text), PIECE):
            check_client()
            if tokens > EXCESS * positions:
                raise TooLong(int(tokens / EXCESS))
            tokens += len(tokenizer.encode(text[start : start + PIECE], add_special_tokens=False))
    if tokens > EXCESS * positions:
        raise TooLong(int(tokens / EXCESS))
