"""Decide where each text decodes: alone by the loop that `generate` has, or with those like it in a pool."""

from collections.abc import Callable

from ..cache.prompt_cache import PromptCache
from ..decoding.run import Run
from .control import Control
from .group import Group, layout_of
from .lone import Lone, is_lone
from .sequence import Response, Sequence
from .settings import Settings

CALM = 16  # cycles that a text has had its pool for itself when it goes on alone: to move copies its caches


class Places:
    """All texts that decode, each in the place that is the fastest for it.

    Texts whose caches have one layout share a pool; who is the only one of a layout decodes alone. Either is left
    when the company changes, between two cycles, with a cache at rest and the row that chose the last token.
    controls: `Controls.control`.
    """

    def __init__(self, settings: Settings, controls: Callable[[int, int, int], Control]):
        self.settings, self.controls = settings, controls
        self.lone: list[Lone] = []
        self.groups: dict[str, Group] = {}

    def __len__(self) -> int:
        return len(self.lone) + len(self.groups)

    @property
    def texts(self) -> list[Sequence]:
        pooled = (text for group in self.groups.values() for text in group.texts)
        return [*pooled, *(lone.text for lone in self.lone)]

    @property
    def pool_nbytes(self) -> int:
        """Bytes of the pools."""
        return sum(group.pool.nbytes for group in self.groups.values() if group.pool)

    def let_in(self, text: Sequence, run: Run) -> None:
        """Let a text decode that has a cache at rest; `run` has chosen the token behind it, which was shown."""
        layout = None if is_lone(text) else layout_of(text.cache)
        if layout in self.groups or (layout and any(lone.layout == layout for lone in self.lone)):
            self._group(layout).join(text, run)
        else:
            self.lone.append(Lone(text, run, self.settings, layout))

    def cycle(self) -> list[Response]:
        """Take a cycle of every text, after which some may move; return what was said."""
        shown = []
        for lone in self.lone:
            if lone.layout in self.groups:
                shown += lone.finish()
                if not lone.text.over:
                    self.groups[lone.layout].join(lone.text, lone.run)
            else:
                shown += lone.cycle()
        self.lone = [lone for lone in self.lone if lone.layout not in self.groups]
        for layout, group in [*self.groups.items()]:
            if group.alone < CALM:
                shown += group.cycle()
                continue
            said, left = group.finish()
            shown += said
            self.lone += [Lone(text, run, self.settings, layout) for text, run in left]
        self._tidy()
        return shown

    def hide(self) -> None:
        """Note that something else was computed, so that the time of the next cycles tells nothing."""
        for lone in self.lone:
            lone.hidden = True
        for group in self.groups.values():
            group.clock.hidden = True

    def cache_of(self, text: Sequence) -> PromptCache:
        """Copy the cache of a text as it stands: all its tokens but the last that was told."""
        for lone in self.lone:
            if lone.text is text:
                return lone.cache_of()
        return next(group for group in self.groups.values() if text in group.texts).cache_of(text)

    def take_out(self, text: Sequence) -> None:
        """Let a text go before its end."""
        for group in self.groups.values():
            if text in group.texts:
                group.take_out(text)
        for lone in self.lone:
            if lone.text is text:
                lone.rest()
        text.over = True
        self._tidy()

    def clear(self) -> None:
        """Let all texts go."""
        for lone in self.lone:
            lone.rest()
        self.lone, self.groups = [], {}

    def _group(self, layout: str) -> Group:
        if layout not in self.groups:
            settings = self.settings
            how = {"chunk": settings.step, "compile_cycles": settings.compile_cycles, "p_min": settings.draft_p_min}
            self.groups[layout] = Group(settings.model, self.controls, settings.stats, **how)
        return self.groups[layout]

    def _tidy(self) -> None:
        """Forget the places of texts that are over."""
        self.lone = [lone for lone in self.lone if not lone.text.over]
        self.groups = {layout: group for layout, group in self.groups.items() if group.texts}
