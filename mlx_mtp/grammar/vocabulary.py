"""Keep what is made from a tokenizer once: llguidance's form of it, compiled grammars, and tokens around texts."""

from collections.abc import Callable
from typing import Any

from .kept import Kept


class Vocabulary:
    """llguidance's tokenizer `own`, with the parsers of grammars by their texts. Any thread may use it."""

    def __init__(self, own: Any):
        self.own, self.parsers = own, Kept()
        self._beyond: dict[bytes, list[list[int]]] = {}

    def parser(self, text: str, make: Callable[[], Any]) -> Any:
        """Return the parser of a grammar's text, None for a style that is not used; it must be copied.

        make: called if it is not kept.
        """
        found = self.parsers.get(text, make)
        if found is make:
            self.parsers.put(text, found := make())
        return found

    def tokens(self, text: str) -> tuple[int, ...]:
        """Return a text's tokens, special tokens included."""
        return tuple(self.own.tokenize_str(text, parse_special=True)) if text else ()

    def beyond(self, mark: bytes) -> list[list[int]]:
        """Return, by the number of a mark's bytes before them, the tokens that complete it and have more bytes."""
        if mark not in self._beyond:
            found: list[list[int]] = [[] for _ in mark]
            for token in range(self.own.vocab_size):
                text = self.own.decode_bytes([token])
                for begun in range(len(mark)):
                    whole = mark[:begun] + text
                    possible = text.startswith(mark[begun:]) or mark in text
                    if possible and whole.find(mark) + len(mark) < len(whole):
                        found[begun].append(token)
            self._beyond[mark] = found
        return self._beyond[mark]
