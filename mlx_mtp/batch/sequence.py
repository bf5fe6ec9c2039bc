"""Follow one text of a batch: what is left of its prompt, its tokens so far, where it stands and when it ends."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationBatch, PromptProcessingBatch, StopSequences

from ..cache.prompt_cache import PromptCache
from ..decoding.prefill import evaluated, first_run, read_again, without_refused
from ..decoding.run import Run
from ..decoding.sampling import Picker
from ..decoding.stats import Stats
from ..decoding.text import Text
from ..layers.target import Target
from ..tuning.kernel_fallback import run_first

PromptResponse = PromptProcessingBatch.Response


@dataclass
class Response(GenerationBatch.Response):
    """A token, as mlx_lm tells it, and whether it was drafted.

    prompt_cache, all_tokens: with the last one, what its cache holds: every token but the last. logprobs: None unless
    asked for.
    """

    logprobs: Any
    prompt_cache: Any
    from_draft: bool = False


@dataclass(eq=False)
class Sequence:
    """One text, and a member of the steps of its pool.

    segments: what is left of its prompt. left: most tokens that may follow, or less than 0. k, max_lookup: most
    drafts of the model's drafter and of prompt lookup in a cycle. text: all tokens that are known, the cache's own
    among them. base: the position of its first row in the newest run. follows: of the next one. slot: its place in
    the pool. over: no more of its tokens are shown. longest: positions that it may come to hold. begun: whether its
    prompt is being read, or was. error: what its own sampler or processor raised.
    """

    uid: int
    segments: list[list[int]]
    cache: PromptCache
    picker: Picker
    stops: StopSequences.Matcher
    left: int
    k: int
    max_lookup: int
    stats: Stats
    total: int = 0
    text: Text = field(default_factory=Text)
    base: int = 0
    follows: int = 0
    slot: int = -1
    over: bool = False
    longest: int = 0
    begun: bool = False
    error: Exception | None = None

    def __post_init__(self):
        self.total = sum(map(len, self.segments))
        self.longest = self.cache.offset + self.total + abs(self.left)

    @property
    def all_tokens(self) -> list[int]:
        """All tokens that are known."""
        return self.text.tokens.tolist()

    def most(self, source: str) -> int:
        """Return the most drafts that it may have of a cycle's source."""
        return self.max_lookup if source == "lookup" else self.k

    def show(self, tokens: list[int], accepted: int, logprobs: mx.array | None) -> list[Response]:
        """Add the right tokens of a run, up to where the text ends, of which `accepted` are drafts."""
        shown = []
        for i, token in enumerate(tokens):
            self.text.extend([token])
            self.left -= 1
            reason = "stop" if self.stops.advance(token) else None if self.left else "length"
            row = None if logprobs is None else logprobs[i]
            shown.append(Response(self.uid, token, row, reason, None, None, i < accepted))
            if reason:
                self.over = True
                break
        return shown

    def fail(self, error: Exception) -> None:
        """End the text, and nobody else's, for what its own sampler or processor raised."""
        self.error, self.over = error, True

    def hand_over(self, shown: list[Response]) -> list[Response]:
        """Give the last of a text's responses its cache, which is at rest, if the text is over."""
        if self.over:
            shown[-1].prompt_cache, shown[-1].all_tokens = self.cache, list(self.cache.tokens)
        return shown


def first_tokens(model: Target, text: Sequence, hidden: mx.array) -> tuple[Run, list[int]]:
    """Choose a text's first new token behind its prompt's hidden rows [1, L, H], and wait for it."""
    return without_refused(model, _first_tokens, model, text, hidden)


def _first_tokens(model: Target, text: Sequence, hidden: mx.array) -> tuple[Run, list[int]]:
    run = first_run(model, text.cache, hidden, text.picker)
    run_first(model)
    return run, evaluated(run.read)[0][0]


def read_text_again(model: Target, text: Sequence, *, step: int) -> Run:
    """Read a text again whose cache is lost, all but its last token; return the row that has chosen that."""
    text.cache.settle(text.all_tokens[:-1])
    row = read_again(model, text.cache, heads=text.k > 0, step=step)[:, -1:]
    return Run.of_row(row, text.all_tokens[-1])
