"""Store the last used values under texts, bounded in number and in bytes of the texts."""

import threading
from collections import OrderedDict
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
