"""Find the calls that tool results belong to, in a time that does not grow with the number of calls."""

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Unanswered(Generic[T]):
    """The calls of one answer that have no result yet, in their order, each under several keys."""

    def __init__(self):
        self._queues: dict[Hashable, deque[tuple[int, T]]] = {}
        self._taken, self._count = set[int](), 0

    def add(self, call: T, *keys: Hashable) -> None:
        """Append a call under different keys."""
        for key in keys:
            self._queues.setdefault(key, deque()).append((self._count, call))
        self._count += 1

    def take(self, key: Hashable) -> T | None:
        """Remove and return the first call under a key; None if there is none."""
        queue = self._queues.get(key)
        while queue:
            number, call = queue.popleft()
            if number not in self._taken:
                self._taken.add(number)
                return call
        return None
