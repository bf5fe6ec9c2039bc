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
from ..decoding.control import Controls
from ..decoding.picture_rows import encoding
from ..decoding.prefill import read_chunk, test_heads
from ..decoding.sampling import LogitsProcessor, Sampler
from ..decoding.sequence import Yielded, first_tokens
from ..decoding.stats import Stats
from ..layers.adapters import adapters_now
from ..layers.target import Target
from ..machine.ranges import check
from ..machine.stream import in_turn
from ..tuning.kernel_switch import switch_on_for_batches
from .admission import Admission
from .arguments import STOPS, columns_of
from .drivers import Drivers
from .responses import PromptResponse, Request, Response
from .settings import BatchSettings

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
        self.settings = settings = BatchSettings(model, chunk, max_kv_size, **options)
        checked.check_sampling(settings.sampling, sampler, settings.draft_sampling)
        self._stops = StopSequences(stop_tokens or None)
        how = {"adaptive": settings.adaptive, "p_min": settings.draft_p_min > 0, "replayed": settings.replays}
        self._admission = Admission(model, ignore=not settings.check_memory, replayed=settings.replays)
        self._queued: deque[Request] = deque()
        self._active: list[Request] = []
        self._drivers = Drivers(settings, Controls(model, **how).control)
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
        self._queued.clear()
        self._failed.clear()
        self._drivers.clear()

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
        return self._drivers.pool_nbytes + sum(r.sequence.cache.nbytes for r in self._requests())

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
            new = [self.settings.request(uid, *each) for uid, each in arguments]
        self._queued += new
        self._uids += n
        return [request.sequence.uid for request in new]

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
        counters, tic, places = self._counters, time.perf_counter(), len(self._drivers)
        responses = self._cycle()
        counters.generation_steps += places
        counters.decode_time += time.perf_counter() - tic
        progress = self._prefill(responses)
        if progress or places > 1:
            self._drivers.hide()
        counters.generation_tokens += len(responses)
        stats = self.settings.stats
        stats.prompt_tokens, stats.generation_tokens = counters.prompt_tokens, counters.generation_tokens
        stats.prefill_time, stats.decode_time = counters.prompt_time, counters.decode_time
        stats.note_peak_memory()
        return progress, responses

    def hide(self) -> None:
        """Mark the next cycle as not timed, because other work is computed before it ends."""
        self._drivers.hide()

    def _cycle(self) -> list[Response]:
        """Run one cycle of the active sequences; return its responses. Requests that have ended are dropped."""
        new: dict[int, list[Yielded]] = {}
        for each in self._drivers.cycle():
            new.setdefault(id(each.sequence), []).extend(each.yielded())
        responses = []
        for request in self._active:
            found = request.responses(new.get(id(request.sequence), ()))
            request.sequence.stats.generation_tokens += len(found)
            responses += self._ended(request, found)
        self._active = [request for request in self._active if not request.sequence.finished]
        return responses

    def _ended(self, request: Request, responses: list[Response]) -> list[Response]:
        """Return the responses of a request; the last one of a finished sequence gets its cache, which is at rest.

        An error that ended the sequence is kept for `next`: its traceback refers to the sequence.
        """
        sequence = request.sequence
        if sequence.error:
            self._failed.append((request.sequence.uid, sequence.error))
            sequence.error = None
        elif sequence.finished and responses:
            responses[-1].prompt_cache, responses[-1].all_tokens = sequence.cache, list(sequence.cache.tokens)
        return responses

    def next_generated(self) -> list[Response]:
        """Call `next` until it returns tokens and return them; [] if no sequence is left. Raises as `next` does."""
        while True:
            responses = self.next()[1]
            if responses or not (self._requests() or self._failed):
                return responses

    @in_turn()
    def extract_cache(self, uids: Any) -> dict[int, tuple[PromptCache, list[int]]]:
        """Return by uid a copy of each sequence's cache, and the tokens in it; the sequences continue.

        The cache of an active sequence has all its tokens but the last, that of a queued one those prefilled so far.
        uids: None for all; unknown or finished ones are left out.
        """
        found = {}
        for request in self._requests(uids):
            queued, sequence = request in self._queued, request.sequence
            cache = sequence.cache.copy() if queued else self._drivers.cache_of(sequence)
            found[request.sequence.uid] = cache, list(cache.tokens)
        return found

    @in_turn()
    def remove(self, uids: Any, return_prompt_caches: bool = False) -> dict[int, tuple[PromptCache, list[int]]]:
        """Cancel sequences; return {}, or with return_prompt_caches what `extract_cache` returns for them.

        uids: a collection; unknown and finished ones are ignored. Errors of these uids not raised yet are dropped.
        """
        caches = self.extract_cache(uids) if return_prompt_caches else {}
        for request in self._requests(uids):
            if request in self._queued:
                self._queued.remove(request)
            else:
                self._active.remove(request)
                self._drivers.remove(request.sequence)
        self._failed = [(uid, error) for uid, error in self._failed if uid not in set(uids)]
        return caches

    def _requests(self, uids: Any = None) -> list[Request]:
        every = [*self._queued, *self._active]
        return every if uids is None else [request for request in every if request.sequence.uid in set(uids)]

    def _prefill(self, responses: list[Response]) -> list[PromptResponse]:
        """Prefill about one chunk of queued prompts, as far as they are admitted; return their progress.

        First tokens of prompts that end are appended to `responses`. A sequence whose prefill raises is removed, and
        its error is kept for `next`.
        """
        progress, tic, left = [], time.perf_counter(), self.settings.chunk
        while left > 0 and self._queued:
            request = self._queued[0]
            try:
                active = [each.sequence for each in self._active]
                room = len(active) < self.completion_batch_size
                if not (request.started or (room and self._admission.admits(request.sequence, active))):
                    break
                left -= self._prefill_chunk(request, progress, responses)
            except Exception as e:
                if request in self._queued:
                    self._queued.remove(request)
                self._failed.append((request.sequence.uid, e))
        self._counters.prompt_time += time.perf_counter() - tic
        return progress

    def _prefill_chunk(self, request: Request, progress: list[PromptResponse], responses: list[Response]) -> int:
        """Prefill the next chunk of a prompt; return the number of tokens read.

        If the next token is a row of a picture that is not yet encoded, encode a part of the picture instead, read no
        token, and return the size of a chunk. A prefilled chunk's progress is appended to `progress`, and after the
        last chunk the response for the first new token to `responses`.
        """
        sequence, cache = request.sequence, request.sequence.cache
        if not request.started:
            request.started = True
            sequence.stats.start()
            cache.begin(cache.offset + request.total)
        chunk, piece = self.settings.chunk, request.segments[0]
        request.encoding = request.encoding or encoding(self.model, cache, piece[:chunk])
        if next(request.encoding, END) is not END:
            self._drivers.hide()
            return chunk
        request.encoding = None
        hidden, n = read_chunk(self.model, cache, piece[:chunk], heads=sequence.k > 0, chunk=chunk)
        request.segments[0] = piece[n:]
        self._counters.prompt_tokens += n
        whole, request.segments = not request.segments[0], [piece for piece in request.segments if piece]
        done = request.total - sum(map(len, request.segments))
        progress.append(PromptResponse(request.sequence.uid, (done, request.total), whole, not request.segments))
        if not request.segments:
            self._queued.popleft()
            responses += self._start(request, hidden)
        return n

    def _start(self, request: Request, hidden: mx.array) -> list[Response]:
        """Choose the first token of a request after its prefill and make it active; return its response in a list.

        If that token ends the sequence, it does not become active and the response has its cache.
        """
        sequence = request.sequence
        if sequence.k:
            test_heads(self.model)
        run, first = first_tokens(self.model, sequence, hidden)
        sequence.append(first)
        sequence.stats.generation_tokens += 1
        if not sequence.finished:
            self._active.append(request)
            self._drivers.activate(sequence, run)
        return self._ended(request, request.responses([(first[0], run.logprobs_of(0), False)]))


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
