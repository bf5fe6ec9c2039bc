"""Decide when a text that waits may begin: as soon as the caches of all that are there fit at their longest."""

from typing import Any

from ..decoding.memory_needs import UNCHECKED, kv_bytes
from ..layers.target import Target
from ..machine import memory
from .group import layout_of
from .rows import slots_for
from .sequence import Sequence


class Admission:
    """Who may come in.

    A slot of a pool is as long as the longest text's, and while a pool grows the old one is there, too. Who comes
    alone comes in: his own needs were looked at when he was inserted. ignore: lets everybody in. replayed: slots are
    as many as cycles are recorded for.
    """

    def __init__(self, model: Target, *, ignore: bool, replayed: bool = False):
        self.model, self.ignore, self.replayed = model, ignore, replayed
        self._bytes: dict[tuple[str, int], int] = {}
        self._refused: Any = None

    def lets_in(self, text: Sequence, there: list[Sequence]) -> bool:
        """Tell whether a text may begin beside others; one that was refused is looked at again when some left."""
        longest, slots = max(t.longest for t in (text, *there)), len(there) + 1
        slots = slots_for(slots) if self.replayed else slots
        if self.ignore or not there or slots * longest <= UNCHECKED:
            return True
        case = text.uid, {t.uid for t in there}
        if case == self._refused:
            return False
        key = layout_of(text.cache), longest
        if key not in self._bytes:
            self._bytes[key] = sum(kv_bytes(self.model, text.cache, longest))
        fits = slots * self._bytes[key] <= memory.available().bytes
        self._refused = None if fits else case
        return fits
