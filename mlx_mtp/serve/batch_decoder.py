"""Decode all active jobs of a loaded model in one batch: each cycle is one pass over the weights for all."""

from collections.abc import Callable, Generator
from contextlib import closing, suppress
from typing import Any

from ..batch.generator import BatchGenerator
from ..batch.responses import Response
from ..batch.settings import SAMPLING
from ..cache.prompt_cache import PromptCache
from ..decoding.sampling import Sampling
from ..decoding.stats import Stats
from ..generate import GenerationResponse, stream_generate, text_response
from ..layers.adapters import adapters_now
from .failures import dropped, log

Responses = Generator[GenerationResponse | None, None, None]
FAILED = "all requests that were decoded together failed; repeat the request"


def decode_alone(
    model: Any, tokenizer: Any, prompt: list[int], options: dict[str, Any], crowded: Callable[[], bool]
) -> Responses:
    """Yield the responses of a job that is decoded without a batch, and None once per cycle, so that others can run.

    prompt: the tokens that are not in `prompt_cache` of `options`. options: of `stream_generate`, with stats.
    crowded: returns whether other jobs run between the cycles; `stats.crowded` is set to that at each response.
    """
    return _with_turns(stream_generate(model, tokenizer, prompt, **options), options["stats"], crowded)


def _with_turns(responses: Any, stats: Stats, crowded: Callable[[], bool]) -> Responses:
    cycles = 0
    with closing(responses):
        for response in responses:
            stats.crowded = crowded()
            yield response
            if stats.cycles != cycles:
                cycles = stats.cycles
                yield None


class BatchDecoder:
    """Decodes jobs of one model in a shared batch, which the first job creates; `step` advances all of them.

    options: keyword arguments of `stream_generate` for all jobs. step: size of a prefill chunk.
    all: this decoder and those of the model's other adapters, each with a batch of its own and the adapter that was
    selected when it was created. other: one of those; None for the first.
    """

    def __init__(
        self, model: Any, tokenizer: Any, options: dict[str, Any], step: int, other: "BatchDecoder | None" = None
    ):
        self.model, self.tokenizer, self.options, self.chunk = model, tokenizer, options, step
        self.all: list[BatchDecoder] = other.all if other else []
        self.all.append(self)
        self._adapted = adapters_now(model)
        self._batch: BatchGenerator | None = None
        self._responses: dict[int, list[Response]] = {}
        self._raised: dict[int, BaseException] = {}

    def step(self) -> None:
        """Run one cycle of all jobs, a pass for each adapter, and queue their responses; without jobs do nothing.

        An exception in the prefill, sampler or logits processor of one job ends that job, any other
        exception all of its batch; none is raised here.
        """
        busy = [(each, batch) for each in self.all if each._responses and (batch := each._batch)]
        for each, batch in busy:
            if len(busy) > 1:
                batch.hide()
            each._cycle(batch)

    def _cycle(self, batch: BatchGenerator) -> None:
        try:
            for response in batch.next()[1]:
                if (queue := self._responses.get(response.uid)) is not None:
                    queue.append(response)
        except BaseException as e:
            failed, batch.failed = batch.failed, None
            if failed is None:
                self._fail(e)
            elif failed in self._responses:
                self._raised[failed] = e

    def _fail(self, error: BaseException) -> None:
        """Log an exception, end this batch's jobs with an error and release it; the next job creates a new batch.

        Batches of other adapters are unaffected.
        """
        with suppress(BaseException):
            log.error(FAILED, exc_info=error)
        with suppress(BaseException):  # a broken batch may raise again
            self._close()

    def close(self) -> None:
        """Release all batches; the generators of jobs that are not finished raise RuntimeError at their next step."""
        for each in self.all:
            each._close()

    def _close(self) -> None:
        batch, self._batch, self._responses, self._raised = self._batch, None, {}, {}
        if batch:
            batch.close()

    def decode(self, prompt: list[int], caches: list[PromptCache], options: dict[str, Any]) -> Responses:
        """Decode one job in the batch; yield its responses, and None when it has to wait for the next `step`.

        caches: a list with the cache of the tokens before `prompt`. The batch removes it and appends, at the end, the
        cache of all tokens but the last; after an early end none if it cannot be copied. options: of
        `stream_generate`, with max_tokens, logprobs and stats. Raises ValueError for invalid options, the exception
        of the job's own code, or RuntimeError if a shared cycle failed or the batch was closed.
        """
        stats, detokenizer, queue, count = options["stats"], self.tokenizer.detokenizer, list[Response](), 0
        uid = self._inserted(prompt, caches, options)
        self._responses[uid] = queue
        try:
            while uid in self._responses:
                yield None
                if self._responses.get(uid) is not queue:
                    raise RuntimeError(FAILED)
                if uid in self._raised:
                    raise self._raised.pop(uid)
                for r in self._popped(uid, caches):
                    count += 1
                    yield text_response(detokenizer, (r.token, r.logprobs, r.from_draft), stats, r.finish_reason)
        finally:
            stats.generation_tokens = count
            if self._responses.get(uid) is queue:  # a new batch repeats the uids
                del self._responses[uid]
                self._raised.pop(uid, None)
                # A sequence that ended in the last cycle, whose responses are unread, has left the batch.
                caches += [queue[-1].prompt_cache] if queue and queue[-1].finish_reason else self._removed(uid)

    def _removed(self, uid: int) -> list[PromptCache]:
        """Remove an unfinished job from the batch; return a list with its cache, [] if that cannot be copied."""
        assert self._batch
        with dropped("the cache of a job was not kept"):
            return [cache for cache, _ in self._batch.remove([uid], return_prompt_caches=True).values()]
        try:
            self._batch.remove([uid])
        except BaseException as e:
            self._fail(e)
        return []

    def _popped(self, uid: int, caches: list[PromptCache]) -> list[Response]:
        """Take and return a job's queued responses; if the last one ends the job, remove it and append its cache."""
        found = [*self._responses[uid]]
        self._responses[uid].clear()
        if found and found[-1].finish_reason:
            caches.append(found[-1].prompt_cache)
            del self._responses[uid]
        return found

    def _inserted(self, prompt: list[int], caches: list[PromptCache], options: dict[str, Any]) -> int:
        """Insert a job into the batch, with the cache that it removes from `caches`; return the job's uid."""
        batch = self._batch = self._batch or self._made()
        sampling = Sampling(**{name: options[name] for name in SAMPLING if name in options})
        (uid,) = batch.insert(
            [prompt],
            [options["max_tokens"]],
            [caches.pop()],
            samplers=[sampling],
            logits_processors=[options.get("logits_processors")],
            stop_sequences=[self._stops(options)],
            seeds=[options.get("seed")],
            logprobs=[options["logprobs"]],
            stats=[options["stats"]],
            grammars=[options.get("grammar")],
            pictures=[options.get("pictures", ())],
        )
        return uid

    def _made(self) -> BatchGenerator:
        options = {**self.options, "stop_tokens": self._stops(self.options), "check_memory": False}
        with self._adapted():
            return BatchGenerator(self.model, prefill_step_size=self.chunk, **options)

    def _stops(self, options: dict[str, Any]) -> list[list[int]]:
        """Return a job's stop sequences: one for each of its stop tokens and of the end-of-text tokens."""
        return [[token] for token in {*options.get("stop_tokens", ()), *self.tokenizer.eos_token_ids}]
