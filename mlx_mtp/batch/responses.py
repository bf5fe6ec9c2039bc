"""Hold one queued prompt of a batch, and return mlx_lm's responses for its tokens."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mlx_lm.generate import GenerationBatch, PromptProcessingBatch

from ..decoding.sequence import Sequence, Yielded

PromptResponse = PromptProcessingBatch.Response


@dataclass
class Response(GenerationBatch.Response):
    """mlx_lm's response for one token, with `from_draft`: whether it was an accepted draft.

    prompt_cache, all_tokens: with a sequence's last token, its cache and the tokens in it: every token but the last.
    logprobs: None unless requested.
    """

    logprobs: Any
    prompt_cache: Any
    from_draft: bool = False


@dataclass(eq=False)
class Request:
    """A sequence of a batch and its prompt.

    segments: the part of the prompt that is not prefilled. total: prompt tokens, without a given cache's. started:
    whether its prefill has begun. encoding: the iterator of `picture_rows.encoding` that has begun, or None.
    """

    sequence: Sequence
    segments: list[list[int]]
    total: int = 0
    started: bool = False
    encoding: Iterator[None] | None = None

    def __post_init__(self):
        self.total = sum(map(len, self.segments))

    def responses(self, new: Iterable[Yielded]) -> list[Response]:
        """Return the responses for new tokens; if the sequence has finished, the last one has the reason."""
        found = [
            Response(self.sequence.uid, token, logprobs, None, None, None, drafted)
            for token, logprobs, drafted in new
        ]
        if found and self.sequence.finished:
            found[-1].finish_reason = self.sequence.reason
        return found
