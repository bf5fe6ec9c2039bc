"""Keep what is made from a tokenizer: llguidance's form of it, parsed grammars, and tokens that go beyond a text."""

from collections.abc import Callable
from typing import Any

from .kept import Kept


class Vocabulary:
    """What is kept for a tokenizer. Any thread may use it.

    own: llguidance's tokenizer. parsers: the results of `parser`, by the text of their grammar.
    """

    def __init__(self, own: Any):
        self.own, self.parsers = own, Kept()
        self._beyond: dict[bytes, list[list[int]]] = {}

    def parser(self, text: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returns for a grammar's text: a parser, which must be copied; None for an unused style.

        make: called only if no result of this text is kept; its errors are raised and not kept.
        """
        found = self.parsers.get(text, make)
        if found is make:
            self.parsers.put(text, found := make())
        return found

    def tokens(self, text: str) -> tuple[int, ...]:
        """Return a text's token ids, () for ""; names of special tokens in the text become these tokens."""
        return tuple(self.own.tokenize_str(text, parse_special=True)) if text else ()

    def beyond(self, mark: bytes) -> list[list[int]]:
        """Return, per n = 0 .. len(mark) - 1, the token ids that go beyond a mark whose first n bytes precede them.

        Such a token completes the mark, or contains it, and has more bytes behind it. Kept per mark.
        """
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
