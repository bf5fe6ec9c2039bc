"""Keep what is made from a tokenizer once: llguidance's form of it, compiled grammars, and tokens around texts."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

KEPT, KEPT_BYTES = 200, 1_000_000  # compiled grammars, the last used ones, and bytes of their texts


class Vocabulary:
    """llguidance's tokenizer `own`, with an LRU cache of parsers by the text of their grammar. For any thread."""

    def __init__(self, own: Any):
        self.own = own
        self._parsers: OrderedDict[str, Any] = OrderedDict()
        self._beyond: dict[bytes, list[list[int]]] = {}
        self._lock = threading.Lock()

    def parser(self, text: str, make: Callable[[], Any]) -> Any:
        """Return the parser of a grammar's text; it is made if it is not kept, and must be copied."""
        with self._lock:
            if text in self._parsers:
                self._parsers.move_to_end(text)
                return self._parsers[text]
        parser = make()
        with self._lock:
            self._parsers[text] = parser
            while len(self._parsers) > KEPT or (len(self._parsers) > 1 and sum(map(len, self._parsers)) > KEPT_BYTES):
                self._parsers.popitem(last=False)
        return parser

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
