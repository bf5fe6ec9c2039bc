"""Hold one sequence of a batch: its remaining prompt, its tokens, its positions and its end."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch, StopSequences

from ..cache.prompt_cache import PromptCache
from ..decoding.history import TokenHistory
from ..decoding.prefill import evaluated, first_run, read_again, without_refused
from ..decoding.run import Run
from ..decoding.sampling import Picker
from ..decoding.stats import Stats
from ..layers.target import Target
from ..tuning.kernel_fallback import run_first

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
class Sequence:
    """One sequence of a batch; it is a `Member` of the steps of its pool.

    segments: the part of the prompt that is not prefilled. total: prompt tokens, without a given cache's. remaining:
    maximum number of further tokens, negative for no limit. k, max_lookup: maximum drafts per cycle, of the drafter
    and of prompt lookup. history: all its tokens, empty before the first new one. base, next_base: position of its
    first row in the newest run, and in the next one. slot: index in the pool. finished: no more of its tokens are
    returned.
    max_positions: maximum length of its cache; without a limit of tokens, what a given cache contains, the prompt and
    one more.
    started: whether its prefill has begun. encoding: the iterator of `picture_rows.encoding` that has begun, or None.
    error: the exception that ended the sequence, None once `BatchGenerator` has taken it to raise it.
    """

    uid: int
    segments: list[list[int]]
    cache: PromptCache
    picker: Picker
    stops: StopSequences.Matcher
    remaining: int
    k: int
    max_lookup: int
    stats: Stats
    total: int = 0
    history: TokenHistory = field(default_factory=TokenHistory)
    base: int = 0
    next_base: int = 0
    slot: int = -1
    finished: bool = False
    max_positions: int = 0
    started: bool = False
    error: Exception | None = None
    encoding: Iterator[None] | None = None

    def __post_init__(self):
        self.total = sum(map(len, self.segments))
        self.max_positions = self.cache.offset + self.total + abs(self.remaining)

    @property
    def all_tokens(self) -> list[int]:
        return self.history.exact()

    def max_drafts(self, source: str) -> int:
        """Return the maximum number of drafts that this sequence accepts from a source, by its name in plans."""
        matcher = self.picker.matcher
        if source == "grammar":
            return matcher.most if matcher else 0
        return self.max_lookup if source == "lookup" else self.k

    def append(self, tokens: list[int], accepted: int, logprobs: mx.array | None) -> list[Response]:
        """Append tokens, the first `accepted` of them drafts, up to the sequence's end; return their responses.

        The end is a stop sequence, with a grammar the end of text, or the maximum number of tokens; later tokens are
        dropped, and `finished` is set. logprobs: [tokens, V], or None.
        """
        responses, ends = [], self.picker.matcher.eos if self.picker.matcher else ()
        for i, token in enumerate(tokens):
            self.history.extend([token])
            self.remaining -= 1
            stopped = self.stops.advance(token) or token in ends
            reason = "stop" if stopped else None if self.remaining else "length"
            row = None if logprobs is None else logprobs[i]
            responses.append(Response(self.uid, token, row, reason, None, None, i < accepted))
            if reason:
                self.finished = True
                break
        return responses

    def fail(self, error: Exception) -> None:
        """End this sequence and store the exception that ended it in `error`; raises nothing."""
        self.error, self.finished = error, True

    def attach_cache(self, responses: list[Response]) -> list[Response]:
        """Return the responses. If the sequence is finished, the last one gets its cache, which must be at rest.

        The response is changed in place; for a finished sequence `responses` must not be empty.
        """
        if self.finished:
            responses[-1].prompt_cache, responses[-1].all_tokens = self.cache, list(self.cache.tokens)
        return responses


def first_tokens(model: Target, sequence: Sequence, hidden: mx.array) -> tuple[Run, list[int]]:
    """Return the run that chose the token after a prompt with hidden rows [1, L, H], and that token in a list."""
    return without_refused(model, _first_tokens, model, sequence, hidden)


def _first_tokens(model: Target, sequence: Sequence, hidden: mx.array) -> tuple[Run, list[int]]:
    run = first_run(model, sequence.cache, hidden, sequence.picker)
    run_first(model)
    return run, evaluated(run.read)[0][0]


def prefill_again(model: Target, sequence: Sequence, *, chunk: int) -> Run:
    """Prefill all tokens but the last of a sequence whose cache was lost; return the run of the newest row."""
    sequence.cache.settle(sequence.all_tokens[:-1])
    row = read_again(model, sequence.cache, heads=sequence.k > 0, chunk=chunk)[:, -1:]
    return Run.of_row(row, sequence.all_tokens[-1])
