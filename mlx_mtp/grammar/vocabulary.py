"""Keep what is made from a tokenizer: llguidance's form of it, parsed grammars, and tokens that go beyond a text."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

KEPT, KEPT_BYTES = 200, 1_000_000


class Kept:
    """An LRU cache of at most KEPT values, each under a text. Any thread may use it.

    The texts have at most KEPT_BYTES bytes of UTF-8 together, unless there is only one.
    """

    def __init__(self):
        self._values: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __contains__(self, text: str) -> bool:
        return text in self._values

    def get(self, text: str, default: Any = None) -> Any:
        """Return the value of a text, which becomes the last used one; `default` if it is not kept."""
        with self._lock:
            if text in self._values:
                self._values.move_to_end(text)
            return self._values.get(text, default)

    def put(self, text: str, value: Any) -> None:
        """Keep a value instead of the text's former one; beyond the bounds, drop the least recently used others."""
        with self._lock:
            self._values.pop(text, None)
            self._values[text] = value
            while len(self._values) > KEPT or (len(self._values) > 1 and sum(map(_size, self._values)) > KEPT_BYTES):
                self._values.popitem(last=False)


def _size(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


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
