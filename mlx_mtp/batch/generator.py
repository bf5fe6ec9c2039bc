"""Provide `BatchGenerator`, mlx_lm's interface for several prompts; each sequence has the tokens it has alone."""

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
from ..decoding.history import TokenHistory
from ..decoding.picture_rows import encoding
from ..decoding.prefill import read_chunk, test_heads
from ..decoding.sampling import LogitsProcessor, Sampler
from ..decoding.stats import Stats
from ..layers.adapters import adapters_now
from ..layers.target import Target
from ..machine.ranges import check
from ..machine.stream import in_turn
from ..tuning.kernel_switch import switch_on_for_batches
from .admission import Admission
from .arguments import STOPS, columns_of
from .control import Controls
from .places import Places
from .sequence import PromptResponse, Response, Sequence, first_tokens
from .settings import Settings

END = object()  # what `next` returns at the end of an iterator


@checked.explained
class BatchGenerator:
    """Generates from several prompts at once, with mlx_lm's arguments, methods and responses.

    Sequences can join and leave between calls; each has the tokens that `generate` yields for its prompt alone. Only
    one thread at a time may call it. stop_tokens: lists of token ids; a sequence ends after all ids of any list.
    completion_batch_size: maximum number of sequences that decode at once. prefill_batch_size, stream: ignored.
    Raises ValueError for an option out of range, a model split over ranks, or one that mlx_lm loaded; TypeError for
    an unknown option.
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
        checked.check_call(model, {**locals(), **options})
        check("stop_tokens", stop_tokens, STOPS)
        if ranks := model.ranks:
            raise ValueError(f"model: split over {ranks.size} ranks; a batch needs one rank, call generate instead")
        self.model, self.max_tokens, self.sampler = model, max_tokens, sampler
        self._adapted = adapters_now(model)  # for all sequences: a pass has one adapter
        self.logits_processors = list(logits_processors or [])
        self.completion_batch_size = completion_batch_size
        chunk = checked.default_chunk(model) if prefill_step_size is None else prefill_step_size
        self.settings = settings = Settings(model, chunk, max_kv_size, **options)
        checked.check_sampling(settings.sampling, sampler, settings.draft_sampling)
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
        """The default device's stream, which computes everything."""
        with in_turn():
            return mx.default_stream(mx.default_device())

    @in_turn()
    def close(self) -> None:
        """Cancel all sequences, and drop errors that were not raised yet."""
        self._unprocessed.clear()
        self._failed.clear()
        self._places.clear()

    @contextmanager
    def stats(self) -> Iterator[BatchStats]:
        """Context that yields mlx_lm's counters; at its end they are filled with the work done in it."""
        stats = BatchStats()
        start = BatchCountersSnapshot(**asdict(self._counters))
        try:
            yield stats
        finally:
            stats += BatchCountersSnapshot.between(start, BatchCountersSnapshot(**asdict(self._counters)))

    @property
    def prompt_cache_nbytes(self) -> int:
        """Bytes of the caches of all sequences, queued and active, and of the pools with their free slots."""
        return self._places.pool_nbytes + sum(s.cache.nbytes for s in self._sequences())

    def insert(
        self, prompts: Any, max_tokens: Any = None, caches: Any = None, *more: Any, **options: Any
    ) -> list[int]:
        """Queue prompts of token ids; return each one's uid.

        Other arguments, all as lists with one entry per prompt, are those of `insert_segments`.
        """
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
        grammars: Any = None,
        pictures: Any = None,
    ) -> list[int]:
        """Queue prompts given as lists of segments, at whose ends prefill chunks end; return each one's uid.

        Each other argument is a list with one entry per prompt, or None for this generator's own value. caches: of
        `make_prompt_cache`; they are copied. all_tokens: ignored. samplers: mlx_lm's callables, or a `Sampling`.
        stop_sequences: mlx_lm's, or lists of token ids. num_draft_tokens: up to the model's maximum, also above this
        generator's value. logprobs: whether responses contain them. stats: a `Stats` to fill, one per prompt.
        grammars: of `mlx_mtp.grammar`, made with `tokenizer=`. pictures: lists of the `Picture`s whose `tokens` are
        in the prompt; those that its cache has read may be left out. A None in a list means no processors, stop
        sequences, grammar or pictures, a new cache or `Stats`, and of the other arguments this generator's value.
        Raises ValueError for an invalid argument of any prompt; none of the prompts is then queued.
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
            "grammars": (grammars, self.settings.grammar),
            "pictures": (pictures, ()),
        }
        _check_prompts(segments)
        n = len(segments)
        columns = columns_of(given, n)
        columns.pop("all_tokens")
        columns["samplers"] = [sampler or self.sampler for sampler in columns["samplers"]]
        _check_stats(self.settings.stats, columns["stats"])
        arguments = enumerate(zip(segments, *columns.values(), strict=True), self._uids)
        with self._adapted():
            new = [self.settings.sequence(uid, *each) for uid, each in arguments]
        self._unprocessed += new
        self._uids += n
        return [sequence.uid for sequence in new]

    @in_turn()
    def next(self) -> tuple[list[PromptResponse], list[Response]]:
        """Run one cycle of the active sequences; of queued ones prefill about one chunk, or encode part of a picture.

        Returns one response per prefilled chunk, and one per new token, those of a sequence in order. An error of one
        sequence in an earlier call (of its sampler, processors, grammar or prefill, or of a cycle in which it is
        decoded outside the pool) is raised now, and no cycle is run: the sequence has ended, `failed` is its uid, and
        the next call continues. Otherwise `failed` is None.
        """
        with self._adapted():
            return self._next()

    def _next(self) -> tuple[list[PromptResponse], list[Response]]:
        self.failed = None
        if self._failed:
            self.failed = self._failed[0][0]
            raise self._failed.pop(0)[1]
        counters, tic, active = self._counters, time.perf_counter(), self._places.sequences
        places = len(self._places)
        responses = self._places.cycle()
        self._collect_failed(active)
        counters.generation_steps += places
        counters.decode_time += time.perf_counter() - tic
        progress = self._prefill(responses)
        if progress or places > 1:
            self._places.hide()
        counters.generation_tokens += len(responses)
        stats = self.settings.stats
        stats.prompt_tokens, stats.generation_tokens = counters.prompt_tokens, counters.generation_tokens
        stats.prefill_time, stats.decode_time = counters.prompt_time, counters.decode_time
        stats.note_peak_memory()
        return progress, responses

    def hide(self) -> None:
        """Mark the next cycle as not timed, because other work is computed before it ends."""
        self._places.hide()

    def _collect_failed(self, sequences: list[Sequence]) -> None:
        """Move the errors of sequences to the list to raise: an error's traceback refers to its sequence."""
        for sequence in sequences:
            if sequence.error:
                self._failed.append((sequence.uid, sequence.error))
                sequence.error = None

    def next_generated(self) -> list[Response]:
        """Call `next` until it returns tokens and return them; [] if no sequence is left. Raises as `next` does."""
        while True:
            responses = self.next()[1]
            if responses or not (self._sequences() or self._failed):
                return responses

    @in_turn()
    def extract_cache(self, uids: Any) -> dict[int, tuple[PromptCache, list[int]]]:
        """Return by uid a copy of each sequence's cache, and the tokens in it; the sequences continue.

        The cache of an active sequence has all its tokens but the last, that of a queued one those prefilled so far.
        uids: None for all; unknown or finished ones are left out.
        """
        found = {}
        for sequence in self._sequences(uids):
            cache = sequence.cache.copy() if sequence in self._unprocessed else self._places.cache_of(sequence)
            found[sequence.uid] = cache, list(cache.tokens)
        return found

    @in_turn()
    def remove(self, uids: Any, return_prompt_caches: bool = False) -> dict[int, tuple[PromptCache, list[int]]]:
        """Cancel sequences; return {}, or with return_prompt_caches what `extract_cache` returns for them.

        uids: a collection; unknown and finished ones are ignored. Errors of these uids not raised yet are dropped.
        """
        caches = self.extract_cache(uids) if return_prompt_caches else {}
        for sequence in self._sequences(uids):
            if sequence in self._unprocessed:
                self._unprocessed.remove(sequence)
            else:
                self._places.remove(sequence)
        self._failed = [(uid, error) for uid, error in self._failed if uid not in set(uids)]
        return caches

    def _sequences(self, uids: Any = None) -> list[Sequence]:
        every = [*self._unprocessed, *self._places.sequences]
        return every if uids is None else [s for s in every if s.uid in set(uids)]

    def _prefill(self, responses: list[Response]) -> list[PromptResponse]:
        """Prefill about one chunk of queued prompts, as far as they are admitted; return their progress.

        First tokens of prompts that end are appended to `responses`. A sequence whose prefill raises is removed, and
        its error is kept for `next`.
        """
        progress, tic, left = [], time.perf_counter(), self.settings.chunk
        while left > 0 and self._unprocessed:
            sequence = self._unprocessed[0]
            try:
                active = self._places.sequences
                room = len(active) < self.completion_batch_size
                if not (sequence.started or (room and self._admission.admits(sequence, active))):
                    break
                left -= self._prefill_chunk(sequence, progress, responses)
            except Exception as e:
                if sequence in self._unprocessed:
                    self._unprocessed.remove(sequence)
                sequence.fail(e)
                self._collect_failed([sequence])
        self._counters.prompt_time += time.perf_counter() - tic
        return progress

    def _prefill_chunk(self, sequence: Sequence, progress: list[PromptResponse], responses: list[Response]) -> int:
        """Prefill the next chunk of a sequence's prompt; return the number of tokens read.

        If the next token is a row of a picture that is not yet encoded, encode a part of the picture instead, read no
        token, and return the size of a chunk. A prefilled chunk's progress is appended to `progress`, and after the
        last chunk the response for the first new token to `responses`.
        """
        if not sequence.started:
            sequence.started = True
            sequence.stats.start()
            sequence.cache.begin(sequence.cache.offset + sequence.total)
        chunk, piece = self.settings.chunk, sequence.segments[0]
        sequence.encoding = sequence.encoding or encoding(self.model, sequence.cache, piece[:chunk])
        if next(sequence.encoding, END) is not END:
            self._places.hide()
            return chunk
        sequence.encoding = None
        hidden, n = read_chunk(self.model, sequence.cache, piece[:chunk], heads=sequence.k > 0, chunk=chunk)
        sequence.segments[0] = piece[n:]
        self._counters.prompt_tokens += n
        whole, sequence.segments = not sequence.segments[0], [piece for piece in sequence.segments if piece]
        done = sequence.total - sum(map(len, sequence.segments))
        progress.append(PromptResponse(sequence.uid, (done, sequence.total), whole, not sequence.segments))
        if not sequence.segments:
            self._unprocessed.popleft()
            responses += self._start(sequence, hidden)
        return n

    def _start(self, sequence: Sequence, hidden: mx.array) -> list[Response]:
        """Choose the first token of a sequence after its prefill and make it active; return its response in a list.

        If that token ends the sequence, it does not become active and the response has its cache.
        """
        if sequence.k:
            test_heads(self.model)
        run, first = first_tokens(self.model, sequence, hidden)
        sequence.history = TokenHistory(sequence.cache.ids, sequence.cache.tokens)
        responses = sequence.append(first, 0, run.logprobs[0] if run.logprobs else None)
        sequence.stats.note_first_token()
        sequence.stats.generation_tokens += 1
        if not sequence.finished:
            self._places.activate(sequence, run)
        return sequence.attach_cache(responses)


def _check_stats(whole: Stats, each: list[Stats | None]) -> None:
    """Raise ValueError if one `Stats` object is given for two prompts, or is the generator's, `whole`."""
    own = [whole, *(stats for stats in each if stats is not None)]
    if len({id(stats) for stats in own}) < len(own):
        raise ValueError("stats: one Stats is given for two prompts, or is the generator's; give each prompt its own")


def _check_prompts(segments: Any) -> None:
    """Raise ValueError if a prompt has no tokens. segments: for each prompt a list of lists of token ids."""
    for i, pieces in enumerate(segments):
        if not any(len(piece) for piece in pieces):
            raise ValueError(f"prompts[{i}]: empty; expected at least one token id")
