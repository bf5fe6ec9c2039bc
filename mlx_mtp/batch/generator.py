"""Generate from several prompts at once (`BatchGenerator`), with mlx_lm's names and its texts one by one."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences
from mlx_lm.generate_utils import BatchCounters, BatchCountersSnapshot, BatchStats

from ..cache.prompt_cache import PromptCache
from ..decoding import options as checked
from ..decoding.prefill import read_chunk, test_heads
from ..decoding.sampling import LogitsProcessor, Sampler
from ..decoding.stats import Stats
from ..decoding.text import Text
from ..layers.target import Target
from ..machine.stream import in_turn
from ..tuning.kernel_switch import switch_on_for_batches
from .admission import Admission
from .control import Controls
from .places import Places
from .sequence import PromptResponse, Response, Sequence, first_tokens
from .settings import Settings


@checked.explained
class BatchGenerator:
    """Generate from prompts that come and go, with mlx_lm's arguments, methods and responses.

    One thread at a time may call it. Every text has the tokens that `generate` gives for it
    alone, whatever the others are and whenever they come.
    stop_tokens: lists of token ids, each of which ends a text. completion_batch_size: most texts at once.
    prefill_batch_size, stream: of no account. Raises ValueError for an option out of range.
    """

    def __init__(
        self,
        model: Target,
        *,
        max_tokens: int = 128,
        stop_tokens: Any = None,
        sampler: Sampler | None = None,
        logits_processors: list[LogitsProcessor] | None = None,
        completion_batch_size: int = 32,
        prefill_batch_size: int = 8,
        prefill_step_size: int | None = None,
        max_kv_size: int | None = None,
        stream: Any = None,
        **options: Any,
    ):
        checked.check_model(model)
        if ranks := model.ranks:
            raise ValueError(f"model: split over {ranks.size} ranks; texts at once are for one, here call generate")
        self.model, self.max_tokens, self.sampler = model, max_tokens, sampler
        self.logits_processors = list(logits_processors or [])
        self.completion_batch_size = completion_batch_size
        step = checked.default_step(model) if prefill_step_size is None else prefill_step_size
        self.settings = settings = Settings(model, step, max_kv_size, **options)
        checked.check_sampling(settings.sampling, sampler, settings.draft_sampling)
        checked.check_numbers(max_tokens, step, settings.seed, settings.draft_p_min)
        self._stops = StopSequences(stop_tokens or None)
        how = {"adaptive": settings.adaptive, "p_min": settings.draft_p_min > 0, "replayed": settings.replays}
        self._admission = Admission(model, ignore=not settings.check_memory, replayed=settings.replays)
        self._unprocessed: deque[Sequence] = deque()
        self._places = Places(settings, Controls(model, **how).control)
        self.failed: int | None = None
        self._failed: list[tuple[int, Exception]] = []
        self._uids = 0
        self._counters = BatchCounters()
        switch_on_for_batches(model)

    @property
    def stream(self) -> mx.Stream:
        """The stream of the default device that all work goes to."""
        with in_turn():
            return mx.default_stream(mx.default_device())

    @in_turn()
    def close(self) -> None:
        """Drop all sequences."""
        self._unprocessed.clear()
        self._failed.clear()
        self._places.clear()

    @contextmanager
    def stats(self) -> Iterator[BatchStats]:
        """Give mlx_lm's counters of the work done while the block runs, filled when it ends."""
        stats = BatchStats()
        start = BatchCountersSnapshot(**asdict(self._counters))
        try:
            yield stats
        finally:
            stats += BatchCountersSnapshot.between(start, BatchCountersSnapshot(**asdict(self._counters)))

    @property
    def prompt_cache_nbytes(self) -> int:
        """Bytes of the caches of all texts."""
        return self._places.pool_nbytes + sum(s.cache.nbytes for s in self._texts())

    def insert(
        self, prompts: Any, max_tokens: Any = None, caches: Any = None, *more: Any, **options: Any
    ) -> list[int]:
        """Queue prompts of token ids, as `insert_segments` does prompts in pieces; return a number for each."""
        return self.insert_segments([[prompt] for prompt in prompts], max_tokens, caches, *more, **options)

    @in_turn()
    def insert_segments(
        self,
        segments: Any,
        max_tokens: Any = None,
        caches: Any = None,
        all_tokens: Any = None,
        samplers: Any = None,
        logits_processors: Any = None,
        stop_sequences: Any = None,
        seeds: Any = None,
        num_draft_tokens: Any = None,
        logprobs: Any = None,
        stats: Any = None,
    ) -> list[int]:
        """Queue prompts whose reading stops at the end of each segment; return a number for each.

        Of all but `segments`, a list with one entry for each prompt, or None for this generator's own. caches: of
        `make_prompt_cache`, left as they are. all_tokens: of no account, caches know theirs. samplers: mlx_lm's
        callables, or a `Sampling`. stop_sequences: mlx_lm's, or lists of token ids. num_draft_tokens: at most what
        the model's heads can draft, whatever this generator's own is. logprobs: whether each is asked for them.
        stats: a `Stats` of each, which is filled. Raises ValueError.
        """
        given = {
            "max_tokens": (max_tokens, self.max_tokens),
            "caches": (caches, None),
            "all_tokens": (all_tokens, None),
            "samplers": (samplers, None),
            "logits_processors": (logits_processors, self.logits_processors),
            "stop_sequences": (stop_sequences, self._stops),
            "seeds": (seeds, None),
            "num_draft_tokens": (num_draft_tokens, None),
            "logprobs": (logprobs, self.settings.logprobs),
            "stats": (stats, None),
        }
        n = len(segments)
        columns = {name: _for_each(name, values, own, n) for name, (values, own) in given.items()}
        columns.pop("all_tokens")
        columns["samplers"] = [sampler or self.sampler for sampler in columns["samplers"]]
        _check_stats(self.settings.stats, columns["stats"])
        every = enumerate(zip(segments, *columns.values(), strict=True), self._uids)
        new = [self.settings.sequence(uid, *each) for uid, each in every]
        self._unprocessed += new
        self._uids += n
        return [text.uid for text in new]

    @in_turn()
    def next(self) -> tuple[list[PromptResponse], list[Response]]:
        """Take one cycle of those that decode, and read on in the prompts of those that are to.

        Returns what each prompt's reading has come to, and the tokens, in order, several of a text perhaps. Raises
        what a text's own sampler or processor, or reading its prompt, raised in the call before: that text is over,
        `failed` is its number, and the next call goes on with the others. Of what else is raised `failed` is None.
        """
        self.failed = None
        if self._failed:
            self.failed = self._failed[0][0]
            raise self._failed.pop(0)[1]
        counters, tic, there = self._counters, time.perf_counter(), self._places.texts
        places = len(self._places)
        shown = self._places.cycle()
        self._note_failed(there)
        counters.generation_steps += places
        counters.decode_time += time.perf_counter() - tic
        read = self._read_prompts(shown)
        if read or places > 1:
            self._places.hide()
        counters.generation_tokens += len(shown)
        self._count()
        return read, shown

    def _note_failed(self, texts: list[Sequence]) -> None:
        """Keep what texts failed of until it can be raised; they let go of it, as it leads back to them."""
        for text in texts:
            if text.error:
                self._failed.append((text.uid, text.error))
                text.error = None

    def _count(self) -> None:
        """Tell the caller's `stats` what all texts took until now."""
        stats, counters = self.settings.stats, self._counters
        stats.prompt_tokens, stats.generation_tokens = counters.prompt_tokens, counters.generation_tokens
        stats.prefill_time, stats.decode_time = counters.prompt_time, counters.decode_time
        stats.notes_memory()

    def next_generated(self) -> list[Response]:
        """Go on until there are tokens; return them, none when all texts are over."""
        while True:
            shown = self.next()[1]
            if shown or not (self._texts() or self._failed):
                return shown

    @in_turn()
    def extract_cache(self, uids: Any) -> dict[int, tuple[PromptCache, list[int]]]:
        """Copy the caches of texts as they stand, each with the tokens it holds; they go on."""
        found = {}
        for text in self._texts_of(uids):
            cache = text.cache.copy() if text in self._unprocessed else self._places.cache_of(text)
            found[text.uid] = cache, list(cache.tokens)
        return found

    @in_turn()
    def remove(self, uids: Any, return_prompt_caches: bool = False) -> dict[int, tuple[PromptCache, list[int]]]:
        """Let texts go before their end; return, if asked for, the cache of each and the tokens it holds."""
        caches = self.extract_cache(uids) if return_prompt_caches else {}
        for text in self._texts_of(uids):
            if text in self._unprocessed:
                self._unprocessed.remove(text)
            else:
                self._places.take_out(text)
        self._failed = [(uid, error) for uid, error in self._failed if uid not in set(uids)]
        return caches

    def _texts_of(self, uids: Any) -> list[Sequence]:
        return [text for text in self._texts() if text.uid in set(uids)]

    def _texts(self) -> list[Sequence]:
        return [*self._unprocessed, *self._places.texts]

    def _read_prompts(self, shown: list[Response]) -> list[PromptResponse]:
        """Read about a chunk of the prompts that wait; add first tokens to `shown`."""
        read, tic = [], time.perf_counter()
        left = self.settings.step
        while left > 0 and self._unprocessed:
            text = self._unprocessed[0]
            try:
                if not self._admits(text):
                    break
                left -= self._read_on(text, read, shown)
            except Exception as e:
                if text in self._unprocessed:
                    self._unprocessed.remove(text)
                text.fail(e)
                self._note_failed([text])
        self._counters.prompt_time += time.perf_counter() - tic
        return read

    def _read_on(self, text: Sequence, read: list[PromptResponse], shown: list[Response]) -> int:
        """Read a chunk of a text's prompt, after the last one choose its first token; return the chunk's length."""
        if not text.begun:
            text.begun = True
            text.stats.start()
            text.cache.begin(text.cache.offset + text.total)
        hidden, n = self._read_piece(text)
        self._counters.prompt_tokens += n
        whole, text.segments = not text.segments[0], [piece for piece in text.segments if piece]
        done = text.total - sum(map(len, text.segments))
        read.append(PromptResponse(text.uid, (done, text.total), whole, not text.segments))
        if not text.segments:
            self._unprocessed.popleft()
            shown += self._begun(text, hidden)
        return n

    def _admits(self, text: Sequence) -> bool:
        """Tell whether the first that waits may begin, or has begun."""
        there = self._places.texts
        return text.begun or (len(there) < self.completion_batch_size and self._admission.lets_in(text, there))

    def _read_piece(self, text: Sequence) -> tuple[mx.array, int]:
        step, piece = self.settings.step, text.segments[0]
        hidden, n = read_chunk(self.model, text.cache, piece[:step], heads=text.k > 0, step=step)
        text.segments[0] = piece[n:]
        return hidden, n

    def _begun(self, text: Sequence, hidden: mx.array) -> list[Response]:
        """Choose the first token of a text whose prompt has been read, and let it decode."""
        if text.k:
            test_heads(self.model)
        run, first = first_tokens(self.model, text, hidden)
        text.text = Text(text.cache.tokens)
        shown = text.show(first, 0, run.logprobs[0] if run.logprobs else None)
        text.stats.begins()
        text.stats.generation_tokens += 1
        if not text.over:
            self._places.let_in(text, run)
        return text.hand_over(shown)


def _for_each(name: str, values: Any, own: Any, n: int) -> list[Any]:
    """Return an argument's value for each of n prompts, `own` where none is given."""
    if values is None:
        return [own] * n
    if not hasattr(values, "__len__") or isinstance(values, str):
        raise ValueError(f"{name}={values!r}: expected a list, with one entry for each of {n} prompts")
    if len(values) not in (0, n):
        raise ValueError(f"{name}: {len(values)} of them, expected one for each of {n} prompts")
    return list(values) or [own] * n


def _check_stats(whole: Stats, each: list[Stats | None]) -> None:
    """Raise ValueError where one `Stats` would count two things."""
    own = [whole, *(stats for stats in each if stats is not None)]
    if len({id(stats) for stats in own}) < len(own):
        raise ValueError("stats: expected one Stats for each prompt, none of them twice or the generator's")
