"""Admit a queued sequence once the caches of all active sequences fit in memory at their maximum length."""

from typing import Any

from ..cache.prompt_cache import PromptCache
from ..decoding.memory_needs import UNCHECKED, kv_bytes
from ..decoding.pool_rows import slots_for
from ..decoding.sequence import Sequence
from ..layers.target import Target
from ..machine import memory


class Admission:
    """Decides whether a queued sequence can start: if all slots fit in memory, each as long as the longest sequence.

    ignore: admit every sequence. replayed: round the number of slots up as recorded cycles do.
    """

    def __init__(self, model: Target, *, ignore: bool, replayed: bool = False):
        self.model, self.ignore, self.replayed = model, ignore, replayed
        self._bytes: dict[tuple[str, int], int] = {}
        self._refused: Any = None

    def admits(self, sequence: Sequence, active: list[Sequence]) -> bool:
        """Return whether a sequence can start next to the active ones.

        Always True with `ignore`, without active sequences, and if all slots have at most UNCHECKED positions in sum.
        A refusal of this sequence holds until the active sequences change.
        """
        longest, slots = max(s.longest for s in (sequence, *active)), len(active) + 1
        slots = slots_for(slots) if self.replayed else slots
        if self.ignore or not active or slots * longest <= UNCHECKED:
            return True
        case = id(sequence), {id(s) for s in active}
        if case == self._refused:
            return False
        key = layout_of(sequence.cache), longest
        if key not in self._bytes:
            self._bytes[key] = sum(kv_bytes(self.model, sequence.cache, longest))
        fits = slots * self._bytes[key] <= memory.available().bytes
        self._refused = None if fits else case
        return fits


def layout_of(cache: PromptCache) -> str:
    """Return a key of the cache layout; sequences with equal keys can share a pool."""
    configs = [{name: value for name, value in c.config.items() if name != "start"} for c in cache.caches]
    return f"{len(cache.layers)} {configs} {cache.quantizing}"
