"""Decode a text on its own, by the loop that `generate` has; between any two cycles it can leave for a pool."""

from collections.abc import Generator

from ..cache.prompt_cache import PromptCache
from ..decoding.cycle import Decoder, follow
from ..decoding.loop import Yielded, cycles, following
from ..decoding.memory_needs import RESERVED_TOKENS
from ..decoding.policy import compiled_for, control_for, remember
from ..decoding.recovery import newest_row, settle
from ..decoding.run import Run
from .sequence import Response, Sequence
from .settings import Settings


def is_lone(text: Sequence) -> bool:
    """Tell whether no pool can hold a text: its caches are mlx-lm's, or will be quantized while it decodes."""
    cache, due = text.cache, text.cache.quantizing
    read = cache.offset + sum(map(len, text.segments))
    reaches = due is not None and read <= due.start and (text.left < 0 or due.start < read + text.left)
    return cache.is_mlx_lm or reaches


class Lone:
    """A text between its cycles, and the loop that decodes it; the text's cache is at rest while there is no loop.

    run: has chosen its last token. layout: of its caches, as pools are told apart, None where none can hold it.
    hidden: something else was computed since its last cycle, whose time tells nothing therefore.
    """

    def __init__(self, text: Sequence, run: Run, settings: Settings, layout: str | None):
        self.text, self.run, self.settings, self.layout = text, run, settings, layout
        self.hidden = False
        self._decoder: Decoder | None = None
        self._steps: Generator[Yielded, None, None]

    def cycle(self) -> list[Response]:
        """Take a cycle; return its tokens."""
        d, text, shown = self._decoder or self._begun(), self.text, []
        text.stats.crowded, self.hidden = self.hidden, False
        while not shown or (d.rows <= d.shown.accepted and not text.over):
            try:
                token, logprobs, drafted = next(self._steps)
            except Exception as e:
                self._decoder = None
                text.fail(e)
                return shown
            shown += text.show([token], int(drafted), None if logprobs is None else logprobs[None])
        if text.over:
            self.rest()
        return text.hand_over(shown)

    def finish(self) -> list[Response]:
        """Take the cycle that is under way, the last one here; return its tokens. The cache is at rest then."""
        if self._decoder is None:
            return []
        self._decoder.ended = True
        shown = self.cycle()
        self.rest()
        return shown

    def rest(self) -> None:
        """Bring the cache to rest, holding all tokens but the last; a cycle under way is taken back."""
        if d := self._decoder:
            self._steps.close()
            self.run, self._decoder = newest_row(d), None
            remember(d.model, d.control, d.compiled)  # type: ignore[arg-type]

    def cache_of(self) -> PromptCache:
        """Copy the cache as it stands, at rest."""
        self.rest()
        return self.text.cache.copy()

    def _begun(self) -> Decoder:
        text, s = self.text, self.settings
        cache, stats = text.cache, text.stats
        cache.reserve(min(text.longest, cache.offset + RESERVED_TOKENS))
        compiled = compiled_for(s.model, cache, text.picker, s.compile_cycles)
        p_min = s.draft_p_min
        how = {"adaptive": s.adaptive, "p_min": p_min > 0, "compiled": compiled}
        control = control_for(s.model, text.k, text.max_lookup, **how)
        own = text.picker, control, stats, s.step, text.k, text.max_lookup, p_min, compiled
        self._decoder = d = Decoder(s.model, cache, *own)
        self._steps = decode_on(d, self.run, text.left)
        return d


def decode_on(d: Decoder, run: Run, max_tokens: int) -> Generator[Yielded, None, None]:
    """Yield, as `decode` does, what follows a token that was shown and that `run`, of one row, has chosen.

    The cache holds all tokens before it, now and when this ends.
    """
    first = follow(d, lambda: run)
    try:
        d.text.extend(run.read()[0][0])
        d.clock.restart()
        yield from cycles(d, following(d, first, None), max_tokens, ())
    finally:
        settle(d)
