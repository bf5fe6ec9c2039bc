"""Generate from several prompts at once (`BatchGenerator`), with mlx_lm's names and its texts one by one."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import mlx.core as mx
from mlx_lm.generate import StopSequences
from mlx_lm.generate_utils import BatchCounters, BatchCountersSnapshot, BatchStats
from mlx_lm.sample_utils import greedy_sampler

from ..cache.from_mlx_lm import from_mlx_lm
from ..decoding import options as checked
from ..decoding.prefill import first_run, read_chunk, test_heads
from ..decoding.sampling import LogitsProcessor, Picker, Sampler, Sampling, random_key
from ..layers.target import Target
from ..machine.memory import wired
from ..machine.stream import in_turn
from .group import Group, layout_of
from .sequence import PromptResponse, Response, Sequence


class BatchGenerator:
    """Texts that decode together, with mlx_lm's arguments, methods and responses; of one thread at a time.

    Every text has the tokens that `generate` gives for it alone, whatever the others are and whenever they come.
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
        num_draft_tokens: int | None = None,
        kv_bits: int | None = None,
        mtp_kv_bits: int | None = None,
        kv_group_size: int | None = None,
        quantized_kv_start: int = checked.QUANTIZED_KV_START,
        logprobs: bool = False,
        draft_sampling: str = "coupled",
        seed: int | None = None,
        **sampling: Any,
    ):
        checked.check_model(model)
        self.model, self.max_tokens, self.sampler = model, max_tokens, sampler
        self.logits_processors = logits_processors or []
        self.completion_batch_size = max(completion_batch_size, prefill_batch_size)
        self.prefill_step_size = prefill_step_size or checked.default_step()
        self.sampling = Sampling(**sampling)
        self.sampling.validate(model.vocab_size)
        checked.check_sampling(self.sampling, sampler, draft_sampling)
        self._k = checked.draft_count(num_draft_tokens, model, None)
        self._layout = {"kv_bits": kv_bits, "mtp_kv_bits": mtp_kv_bits, "max_kv_size": max_kv_size}
        self._quantized = kv_group_size, quantized_kv_start
        self._logprobs, self._draft_sampling, self._seed = logprobs, draft_sampling, seed
        self._stops = StopSequences(stop_tokens or None)
        self._unprocessed: deque[Sequence] = deque()
        self._groups: dict[str, Group] = {}
        self._uids = 0
        self._counters = BatchCounters()
        self._resident = ExitStack()
        self._resident.enter_context(wired())

    @property
    def stream(self) -> mx.Stream:
        """The stream of the default device that all work goes to."""
        with in_turn():
            return mx.default_stream(mx.default_device())

    def close(self) -> None:
        """Let go of all texts and of what was kept resident for them."""
        self._unprocessed.clear()
        self._groups.clear()
        self._resident.close()

    def __del__(self):
        if hasattr(self, "_resident"):
            self._resident.close()

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
        pools = [group.pool.nbytes for group in self._groups.values() if group.pool]
        return sum(pools) + sum(s.cache.nbytes for s in self._texts())

    def insert(self, prompts: Any, max_tokens: Any = None, caches: Any = None, *more: Any, **options: Any) -> list[int]:
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
    ) -> list[int]:
        """Queue prompts whose reading stops at the end of each segment; return a number for each.

        Of all but `segments`, a list with one entry for each prompt, or None for this generator's own. caches: of
        `make_prompt_cache`, left as they are. all_tokens: of no account, caches know theirs. samplers: mlx_lm's
        callables, or a `Sampling`. stop_sequences: mlx_lm's, or lists of token ids. Raises ValueError.
        """
        n = len(segments)
        given = {
            "max_tokens": max_tokens or [self.max_tokens] * n,
            "caches": caches or [None] * n,
            "all_tokens": all_tokens or [None] * n,
            "samplers": samplers or [None] * n,
            "logits_processors": logits_processors or [self.logits_processors] * n,
            "stop_sequences": stop_sequences or [self._stops] * n,
            "seeds": seeds or [self._seed] * n,
            "num_draft_tokens": num_draft_tokens or [None] * n,
        }
        for name, values in given.items():
            if len(values) != n:
                raise ValueError(f"{name}: {len(values)} of them, expected one for each of {n} prompts")
        given.pop("all_tokens")
        new = [self._sequence(self._uids + i, *each) for i, each in enumerate(zip(segments, *given.values(), strict=True))]
        self._unprocessed += new
        self._uids += n
        return [text.uid for text in new]

    def _sequence(
        self, uid: int, segments: Any, most: int, cache: Any, sampler: Any, processors: Any, stops: Any, seed: Any, k: Any
    ) -> Sequence:
        pieces = [checked.token_ids(piece, self.model.vocab_size) for piece in segments if len(piece)]
        if not pieces:
            raise ValueError(f"prompts[{uid}]: empty; expected at least one token id")
        checked.check_numbers(most, self.prefill_step_size, seed, 0.0)
        if most < 1:
            raise ValueError(f"max_tokens={most}: allowed is 1 or more")
        cache = from_mlx_lm(self.model, cache)
        k = checked.draft_count(self._k if k is None else k, self.model, cache)
        cache = checked.cache_for(self.model, cache, max(k, self._k), *self._quantized, self._layout).copy()
        options = sampler if isinstance(sampler, Sampling) else self.sampling
        sampler = None if isinstance(sampler, Sampling) else sampler or self.sampler
        sampler = None if sampler is greedy_sampler else sampler
        how = tuple(processors or ()), self._logprobs, random_key(seed), self._draft_sampling
        stops = stops if isinstance(stops, StopSequences) else StopSequences(stops)
        return Sequence(uid, pieces, cache, Picker(options, sampler, *how), stops.matcher(), most, k)

    @in_turn()
    def next(self) -> tuple[list[PromptResponse], list[Response]]:
        """Take one cycle of those that decode, and read on in the prompts of those that are to.

        Returns what each prompt's reading has come to, and the tokens, in order, several of a text perhaps.
        """
        counters, shown = self._counters, []
        for group in [group for group in self._groups.values() if group.texts]:
            tic = time.perf_counter()
            shown += group.step()
            counters.decode_time += time.perf_counter() - tic
            counters.generation_steps += 1
        read = self._read_prompts(shown)
        counters.generation_tokens += len(shown)
        return read, shown

    def next_generated(self) -> list[Response]:
        """Go on until there are tokens; return them, none when all texts are over."""
        while True:
            read, shown = self.next()
            if shown or not read:
                return shown

    @in_turn()
    def remove(self, uids: Any, return_prompt_caches: bool = False) -> dict[int, Any]:
        """Let texts go before their end; return, if asked for, the cache of each and the tokens it holds."""
        gone = [text for text in self._texts() if text.uid in set(uids)]
        for text in gone:
            if text in self._unprocessed:
                self._unprocessed.remove(text)
            for group in self._groups.values():
                if text in group.texts:
                    group.take_out(text)
        return {s.uid: (s.cache, list(s.cache.tokens)) for s in gone} if return_prompt_caches else {}

    def _texts(self) -> list[Sequence]:
        return [*self._unprocessed, *(s for group in self._groups.values() for s in group.texts)]

    def _read_prompts(self, shown: list[Response]) -> list[PromptResponse]:
        """Read about a chunk of the prompts that wait; add first tokens to `shown`."""
        read, tic = [], time.perf_counter()
        left = self.prefill_step_size
        while left > 0 and self._unprocessed and len(self._texts()) - len(self._unprocessed) < self.completion_batch_size:
            text = self._unprocessed[0]
            hidden, n = self._read_chunk(text)
            left -= n
            done = text.total - sum(map(len, text.segments))
            whole = not text.segments or not text.segments[0]
            text.segments = [piece for piece in text.segments if piece]
            read.append(PromptResponse(text.uid, (done, text.total), whole, not text.segments))
            self._counters.prompt_tokens += n
            if not text.segments:
                self._unprocessed.popleft()
                shown += self._begun(text, hidden)
        self._counters.prompt_time += time.perf_counter() - tic
        return read

    def _read_chunk(self, text: Sequence) -> tuple[mx.array, int]:
        step, piece = self.prefill_step_size, text.segments[0]
        hidden, n = read_chunk(self.model, text.cache, piece[:step], heads=text.k > 0, step=step)
        text.segments[0] = piece[n:]
        return hidden, n

    def _begun(self, text: Sequence, hidden: mx.array) -> list[Response]:
        """Choose the first token of a text whose prompt has been read, and let it decode."""
        if text.k:
            test_heads(self.model)
        run = first_run(self.model, text.cache, hidden, text.picker)
        text.tokens = list(text.cache.tokens)
        text.base, text.follows = text.cache.offset - 1, text.cache.offset
        shown = text.show(run.read()[0], 0, run.logprobs)
        if text.over:
            shown[-1].prompt_cache, shown[-1].all_tokens = text.cache, list(text.cache.tokens)
            return shown
        text.cache.pop_row()
        group = self._groups.setdefault(layout_of(text.cache), Group(self.model, chunk=self.prefill_step_size))
        group.join(text, run)
        return shown
