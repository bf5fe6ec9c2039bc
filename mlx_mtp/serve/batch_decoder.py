"""Decode the answers of a loaded model together: a cycle of all of them is one pass over the weights."""

import logging
from collections.abc import Generator
from contextlib import suppress
from typing import Any

from ..batch.generator import BatchGenerator
from ..batch.sequence import Response
from ..batch.settings import SAMPLING
from ..cache.prompt_cache import PromptCache
from ..decoding.sampling import Sampling
from ..generate import GenerationResponse, text_response
from .failures import dropped

log = logging.getLogger("mlx_mtp.serve")
Responses = Generator[GenerationResponse | None, None, None]
FAILED = "answers that were decoded together failed"


class BatchDecoder:
    """The batch of a model, and of each of its answers what was said and is not told yet.

    options: keyword arguments of `stream_generate` for all answers. step: tokens of a prompt that are read at a time.
    """

    def __init__(self, model: Any, tokenizer: Any, options: dict[str, Any], step: int):
        self.model, self.tokenizer, self.options, self.chunk = model, tokenizer, options, step
        self._batch: BatchGenerator | None = None
        self._said: dict[int, list[Response]] = {}
        self._raised: dict[int, BaseException] = {}

    def step(self) -> None:
        """Take a cycle of all answers.

        An exception in reading a prompt, a sampler or a processor ends the one answer, any other one all of them.
        """
        batch = self._batch
        if batch is None or not self._said:
            return
        try:
            for response in batch.next()[1]:
                if (said := self._said.get(response.uid)) is not None:
                    said.append(response)
        except BaseException as e:
            failed, batch.failed = batch.failed, None
            if failed is None:
                self._fail(e)
            elif failed in self._said:
                self._raised[failed] = e

    def _fail(self, error: BaseException) -> None:
        """End all answers, and release the batch; the next answer gets a new one."""
        with suppress(BaseException):
            log.error(FAILED, exc_info=error)
        with suppress(BaseException):  # what is broken may not even close
            self.close()

    def close(self) -> None:
        """Release all answers and the batch."""
        batch, self._batch, self._said, self._raised = self._batch, None, {}, {}
        if batch:
            batch.close()

    def decode(self, prompt: list[int], held: list[PromptCache], options: dict[str, Any]) -> Responses:
        """Decode an answer with the others; yield None wherever its turn is over.

        held: the cache in front of `prompt`; it is taken out of the list, and one that holds all but the last token
        comes back. options: of `stream_generate`. Raises ValueError for what cannot be asked for.
        """
        stats, detokenizer, said, told = options["stats"], self.tokenizer.detokenizer, list[Response](), 0
        uid = self._inserted(prompt, held, options)
        self._said[uid] = said
        try:
            while uid in self._said:
                yield None
                if self._said.get(uid) is not said:
                    raise RuntimeError(FAILED)
                if uid in self._raised:
                    raise self._raised.pop(uid)
                for r in self._taken(uid, held):
                    told += 1
                    yield text_response(detokenizer, (r.token, r.logprobs, r.from_draft), stats, r.finish_reason)
        finally:
            stats.generation_tokens = told
            if self._said.get(uid) is said:  # a new batch counts from the first number again
                del self._said[uid]
                self._raised.pop(uid, None)
                held += self._removed(uid)

    def _removed(self, uid: int) -> list[PromptCache]:
        """Take an answer that has not ended out of the batch; return its cache, nothing if that cannot be copied."""
        assert self._batch
        with dropped("the cache of an answer was not kept"):
            return [cache for cache, _ in self._batch.remove([uid], return_prompt_caches=True).values()]
        try:
            self._batch.remove([uid])
        except BaseException as e:
            self._fail(e)
        return []

    def _taken(self, uid: int, held: list[PromptCache]) -> list[Response]:
        """Take what an answer has said; with the last of it, its cache."""
        said = [*self._said[uid]]
        self._said[uid].clear()
        if said and said[-1].finish_reason:
            held.append(said[-1].prompt_cache)
            del self._said[uid]
        return said

    def _inserted(self, prompt: list[int], held: list[PromptCache], options: dict[str, Any]) -> int:
        """Put an answer into the batch; return the number that its responses have."""
        batch = self._batch = self._batch or self._made()
        sampling = Sampling(**{name: options[name] for name in SAMPLING if name in options})
        (uid,) = batch.insert(
            [prompt],
            [options["max_tokens"]],
            [held.pop()],
            samplers=[sampling],
            logits_processors=[options.get("logits_processors")],
            stop_sequences=[self._stops(options)],
            seeds=[options.get("seed")],
            logprobs=[options["logprobs"]],
            stats=[options["stats"]],
        )
        return uid

    def _made(self) -> BatchGenerator:
        options = {**self.options, "stop_tokens": self._stops(self.options), "check_memory": False}
        return BatchGenerator(self.model, prefill_step_size=self.chunk, **options)

    def _stops(self, options: dict[str, Any]) -> list[list[int]]:
        """The sequences that end an answer, each of one token."""
        return [[token] for token in {*options.get("stop_tokens", ()), *self.tokenizer.eos_token_ids}]
