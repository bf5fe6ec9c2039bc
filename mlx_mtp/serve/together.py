"""Decode the answers of a loaded model together: a cycle of all of them is one pass over the weights."""

from collections.abc import Generator
from contextlib import suppress
from typing import Any

from ..batch.generator import BatchGenerator
from ..batch.sequence import Response
from ..batch.settings import SAMPLING
from ..cache.prompt_cache import PromptCache
from ..decoding.sampling import Sampling
from ..generate import GenerationResponse, text_response

Responses = Generator[GenerationResponse | None, None, None]


class Together:
    """The batch of a model, and of each of its answers what was said and is not told yet.

    options: keyword arguments of `stream_generate` for all answers. step: tokens of a prompt that are read at a time.
    """

    def __init__(self, model: Any, tokenizer: Any, options: dict[str, Any], step: int):
        self.model, self.tokenizer, self.options, self.chunk = model, tokenizer, options, step
        self._batch: BatchGenerator | None = None
        self._said: dict[int, list[Response]] = {}
        self._raised: dict[int, Exception] = {}
        self._error: Exception | None = None

    def step(self) -> None:
        """Take a cycle of all answers; one fails of its own sampler or processor, all of anything else."""
        if not self._said:
            return
        assert self._batch
        try:
            for response in self._batch.next()[1]:
                self._said[response.uid].append(response)
        except Exception as e:
            if self._batch.failed is not None:
                self._raised[self._batch.failed] = e
                return
            self._error = e
            with suppress(Exception):  # what is broken may not even close
                self.close()

    def close(self) -> None:
        """Let go of all answers, and of the batch."""
        batch, self._batch, self._said = self._batch, None, {}
        if batch:
            batch.close()

    def decode(self, prompt: list[int], held: list[PromptCache], options: dict[str, Any]) -> Responses:
        """Decode an answer with the others; yield None wherever its turn is over.

        held: the cache in front of `prompt`; it is taken out of the list, and one that holds all but the last token
        comes back. options: of `stream_generate`. Raises ValueError for what cannot be asked for.
        """
        uid, stats, told = self._inserted(prompt, held, options), options["stats"], 0
        detokenizer, said = self.tokenizer.detokenizer, self._said.setdefault(uid, [])
        try:
            while uid in self._said:
                yield None
                if self._said.get(uid) is not said:
                    raise RuntimeError("answers that were decoded together failed") from self._error
                if uid in self._raised:
                    raise self._raised.pop(uid)
                for r in self._taken(uid, held):
                    told += 1
                    yield text_response(detokenizer, (r.token, r.logprobs, r.from_draft), stats, r.finish_reason)
        finally:
            stats.generation_tokens = told
            self._raised.pop(uid, None)
            if self._batch and self._said.pop(uid, None) is not None:
                held += [cache for cache, _ in self._batch.remove([uid], return_prompt_caches=True).values()]

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
