"""Assign each sequence to the loop of `generate`, where it decodes alone, or to the pool of its cache layout."""

from collections.abc import Callable

from ..cache.prompt_cache import PromptCache
from ..decoding.run import Run
from .admission import layout_of
from .control import Control
from .group import Group
from .lone import Lone, is_lone
from .sequence import Response, Sequence
from .settings import Settings

CALM = 16  # cycles that the last sequence of a pool stays in it, because leaving copies its caches


class Places:
    """All active sequences: groups, each with a pool for one cache layout, and lone sequences, which decode alone.

    A sequence is lone if `is_lone` returns True for it, or if no other active sequence has its cache layout. The last
    sequence of a pool becomes lone after CALM cycles as the only one. Sequences move only between two cycles.
    controls: `Controls.control`, or a function with the same arguments and result.
    """

    def __init__(self, settings: Settings, controls: Callable[..., Control]):
        self.settings, self.controls = settings, controls
        self.lone: list[Lone] = []
        self.groups: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self.lone) + len(self.groups)

    @property
    def sequences(self) -> list[Sequence]:
        pooled = (sequence for group in self.groups.values() for sequence in group.sequences)
        return [*pooled, *(lone.sequence for lone in self.lone)]

    @property
    def pool_nbytes(self) -> int:
        return sum(group.pool.nbytes for group in self.groups.values() if group.pool)

    def activate(self, sequence: Sequence, run: Run) -> None:
        """Start decoding a sequence, whose cache is at rest; `run`, of one row, chose its last token."""
        layout = None if is_lone(sequence) else layout_of(sequence.cache)
        if layout in self.groups or (layout and any(lone.layout == layout for lone in self.lone)):
            self._group(layout).join(sequence, run)
        else:
            self.lone.append(Lone(sequence, run, self.settings, layout))

    def cycle(self) -> list[Response]:
        """Run one cycle of every sequence, move sequences between loop and pool, and return the tokens.

        An error of a sequence's own sampler, processor or grammar, and any of a lone sequence's cycle, is stored in
        the sequence; others are raised. Finished sequences are dropped at the end.
        """
        responses = []
        for lone in self.lone:
            if lone.layout in self.groups:
                responses += lone.finish()
                if not lone.sequence.finished:
                    self.groups[lone.layout].join(lone.sequence, lone.run)
            else:
                responses += lone.cycle()
        self.lone = [lone for lone in self.lone if lone.layout not in self.groups]
        for layout, group in [*self.groups.items()]:
            if group.lone_cycles < CALM:
                responses += group.cycle()
                continue
            last, left = group.finish()
            responses += last
            self.lone += [Lone(sequence, run, self.settings, layout) for sequence, run in left]
        self._drop_finished()
        return responses

    def hide(self) -> None:
        """Mark the next cycle of each lone sequence and pool as not timed, because other work was computed."""
        for lone in self.lone:
            lone.hidden = True
        for group in self.groups.values():
            group.clock.hidden = True

    def cache_of(self, sequence: Sequence) -> PromptCache:
        """Return a copy of an active sequence's cache, at rest: it contains every token but the last one returned."""
        for lone in self.lone:
            if lone.sequence is sequence:
                return lone.cache_of()
        return next(group for group in self.groups.values() if sequence in group.sequences).cache_of(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Cancel a sequence; the cache of one that decoded alone is left at rest."""
        for group in self.groups.values():
            if sequence in group.sequences:
                group.remove(sequence)
        for lone in self.lone:
            if lone.sequence is sequence:
                lone.rest()
        sequence.finished = True
        self._drop_finished()

    def clear(self) -> None:
        """Cancel all sequences."""
        for lone in self.lone:
            lone.rest()
        for group in self.groups.values():
            group.close()
        self.lone, self.groups = [], {}

    def _group(self, layout: str) -> Group:
        if layout not in self.groups:
            settings = self.settings
            how = {"chunk": settings.chunk, "compile_cycles": settings.compile_cycles, "p_min": settings.draft_p_min}
            self.groups[layout] = Group(settings.model, self.controls, settings.stats, **how)
        return self.groups[layout]

    def _drop_finished(self) -> None:
        self.lone = [lone for lone in self.lone if not lone.sequence.finished]
        for layout in [layout for layout, group in self.groups.items() if not group.sequences]:
            self.groups.pop(layout).close()
