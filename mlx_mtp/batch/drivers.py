"""Assign each active sequence of a batch to a driver: to that of its cache layout, or to one of its own."""

from collections.abc import Callable, Iterator
from typing import Any

from ..cache.prompt_cache import PromptCache
from ..decoding.driver import Driver, NewTokens
from ..decoding.run import Run
from ..decoding.seating import DriverOptions
from ..decoding.sequence import Sequence
from .admission import layout_of
from .settings import BatchSettings


def is_lone(sequence: Sequence) -> bool:
    """Return whether a sequence must decode alone: because of its model or caches, or as it will quantize them."""
    cache, due, limit = sequence.cache, sequence.cache.quantizing, sequence.remaining
    reaches = due is not None and cache.offset <= due.start and (limit < 0 or due.start < cache.offset + limit)
    return cache.is_mlx_lm or cache.model.runtime.alone is not None or reaches


class Drivers:
    """The drivers of all active sequences: `shared` by cache layout, `own` of one sequence that must decode alone.

    controls: `Controls.control`, or a function with the same arguments and result.
    """

    def __init__(self, settings: BatchSettings, controls: Callable[..., Any]):
        self.settings, self.controls = settings, controls
        self.own: list[Driver] = []
        self.shared: dict[str, Driver] = {}

    def __len__(self) -> int:
        return len(self.own) + len(self.shared)

    def __iter__(self) -> Iterator[Driver]:
        return iter((*self.own, *self.shared.values()))

    @property
    def sequences(self) -> list[Sequence]:
        return [sequence for driver in self for sequence in driver.sequences]

    @property
    def pool_nbytes(self) -> int:
        return sum(driver.pool_nbytes for driver in self)

    def activate(self, sequence: Sequence, run: Run) -> None:
        """Start decoding a sequence, whose cache is at rest; `run`, of one row, chose its last token."""
        layout = layout_of(sequence.cache)
        if is_lone(sequence):
            self.own.append(driver := self._driver())
        elif not (driver := self.shared.get(layout)):
            driver = self.shared[layout] = self._driver()
        driver.join(sequence, run)

    def cycle(self) -> list[NewTokens]:
        """Run one cycle of every driver and return the new tokens; the caches of finished sequences are at rest.

        An error of a sequence's own sampler, processor or grammar, and any of a lone sequence's cycle, is stored in
        the sequence; others are raised. Drivers without sequences are dropped.
        """
        found = [new for driver in self for new in self._cycle(driver)]
        self._drop_finished()
        return found

    def _cycle(self, driver: Driver) -> list[NewTokens]:
        try:
            found = driver.cycle()
        except Exception as e:
            if (sequence := driver.lone) is None:
                raise
            sequence.fail(e)
            found = []
        if driver.lone and driver.lone.finished:
            driver.close()
        return found

    def hide(self) -> None:
        """Mark the next cycle of each driver as not timed, because other work was computed."""
        for driver in self:
            driver.clock.hidden = True

    def cache_of(self, sequence: Sequence) -> PromptCache:
        """Return a copy of an active sequence's cache, at rest: it contains every token but the last one returned."""
        return self._of(sequence).cache_of(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Cancel a sequence; the cache of one that decoded alone is left at rest."""
        self._of(sequence).remove(sequence)
        self._drop_finished()

    def clear(self) -> None:
        """Cancel all sequences."""
        for driver in self:
            driver.close()
        self.own, self.shared = [], {}

    def _of(self, sequence: Sequence) -> Driver:
        return next(driver for driver in self if sequence in driver.sequences)

    def _driver(self) -> Driver:
        s = self.settings
        options = DriverOptions(s.chunk, s.adaptive, s.draft_p_min, s.compile_cycles)
        return Driver(s.model, options, lambda *of: self.controls(*of), s.stats)

    def _drop_finished(self) -> None:
        self.own = [driver for driver in self.own if driver.sequences]
        for layout in [layout for layout, driver in self.shared.items() if not driver.sequences]:
            self.shared.pop(layout).close()
