"""Decode one sequence of a batch by the loop of `generate`; it can move to a pool between two cycles."""

from collections.abc import Generator

from ..cache.prompt_cache import PromptCache
from ..decoding.cycle import Decoder, submit_first
from ..decoding.loop import Yielded, cycles, next_cycle
from ..decoding.memory_needs import RESERVED_TOKENS
from ..decoding.policy import compiled_for, control_for, remember
from ..decoding.recovery import last_row, settle
from ..decoding.run import Run
from .sequence import Response, Sequence
from .settings import Settings


def is_lone(sequence: Sequence) -> bool:
    """Return whether a sequence must decode alone: its caches are mlx-lm's, or its generation will quantize them."""
    cache, due = sequence.cache, sequence.cache.quantizing
    prompt = cache.offset + sum(map(len, sequence.segments))
    limit = sequence.remaining
    reaches = due is not None and prompt <= due.start and (limit < 0 or due.start < prompt + limit)
    return cache.is_mlx_lm or reaches


class Lone:
    """A sequence that is decoded alone, and the loop that decodes it; its cache is at rest while there is no loop.

    run: the row that chose its last token. layout: of its caches, None if no pool can contain them. hidden: do not
    time the next cycle, because other work was computed before it.
    """

    def __init__(self, sequence: Sequence, run: Run, settings: Settings, layout: str | None):
        self.sequence, self.run, self.settings, self.layout = sequence, run, settings, layout
        self.hidden = False
        self._decoder: Decoder | None = None
        self._loop: Generator[Yielded, None, None]

    def cycle(self) -> list[Response]:
        """Run one cycle and return its tokens.

        An error of the loop ends the sequence (`Sequence.fail`), and only the tokens before it are returned.
        """
        d, sequence, responses = self._decoder or self._start(), self.sequence, []
        sequence.stats.crowded, self.hidden = self.hidden, False
        while not responses or (d.emitted <= d.emitting.accepted and not sequence.finished):
            try:
                token, logprobs, drafted = next(self._loop)
            except Exception as e:
                self._decoder = None
                sequence.fail(e)
                return responses
            responses += sequence.append([token], int(drafted), None if logprobs is None else logprobs[None])
        if sequence.finished:
            self.rest()
        return sequence.attach_cache(responses)

    def finish(self) -> list[Response]:
        """Complete the submitted cycle, without beginning another one; rest the cache and return the tokens.

        [] if no loop runs: the cache is then at rest.
        """
        if self._decoder is None:
            return []
        self._decoder.stopping = True
        responses = self.cycle()
        self.rest()
        return responses

    def rest(self) -> None:
        """End the loop, if any, and bring the cache to rest, with every token but the last.

        A submitted cycle is rolled back. The measured costs are stored.
        """
        if d := self._decoder:
            self._loop.close()
            self.run, self._decoder = last_row(d), None
            remember(d.model, d.control, d.compiled)  # type: ignore[arg-type]

    def cache_of(self) -> PromptCache:
        """Return a copy of the cache, with all tokens but the last; the loop ends until the next `cycle`."""
        self.rest()
        return self.sequence.cache.copy()

    def _start(self) -> Decoder:
        sequence, s = self.sequence, self.settings
        cache, picker, k = sequence.cache, sequence.picker, sequence.k
        cache.reserve(min(sequence.max_positions, cache.offset + RESERVED_TOKENS))
        compiled = compiled_for(s.model, cache, picker, s.compile_cycles)
        p_min, lookup = s.draft_p_min, sequence.max_lookup
        how = {"adaptive": s.adaptive, "p_min": p_min > 0, "compiled": compiled, "matcher": picker.matcher}
        control = control_for(s.model, k, lookup, **how)
        d = Decoder(s.model, cache, picker, control, sequence.stats, s.chunk, k, lookup, p_min, compiled)
        self._decoder, self._loop = d, continue_after(d, self.run, sequence.remaining)
        return d


def continue_after(d: Decoder, run: Run, max_tokens: int) -> Generator[Yielded, None, None]:
    """Yield (token, logprobs, whether it was drafted) for the tokens after the one that `run`, of one row, chose.

    The cache is at rest and lacks that token; at the end, also after `close()`, it lacks the last one yielded.
    max_tokens: maximum number of these tokens, negative for no limit.
    """
    first = submit_first(d, lambda: run)
    try:
        d.history.extend(run.read()[0][0])
        d.clock.restart()
        yield from cycles(d, next_cycle(d, first, None), max_tokens, ())
    finally:
        d.thread.shutdown()
        settle(d)
