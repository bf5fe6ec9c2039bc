"""Hold one sequence that is decoded: its cache, how its tokens are chosen, its tokens, its positions and its end."""

from dataclasses import dataclass, field
from typing import NamedTuple

import mlx.core as mx
from mlx_lm.generate import StopSequences

from ..cache.prompt_cache import PromptCache
from ..grammar import Constraint
from ..layers.target import Target
from ..tuning.kernel_fallback import run_first
from .history import TokenHistory
from .policy import forced_drafts, lookup_drafts, tree_rows
from .prefill import evaluated, first_run, without_refused
from .run import Run
from .sampling import Picker
from .stats import Stats

Yielded = tuple[int, mx.array | None, bool]  # a token, its logprobs [V] or None, and whether it was drafted


@dataclass(eq=False)
class Sequence:
    """One sequence of a driver; it is a `Member` of its steps.

    stops: the stop sequences that end it. remaining: maximum number of further tokens, negative for no limit.
    k, max_lookup: maximum drafts per cycle, of the drafter and of prompt lookup. tree: maximum rows of a pass whose
    drafts are a tree, 0 for none. uid: its number in a batch. longest:
    maximum length of its cache, if it is limited; without a limit of tokens one more than the prompt's.
    history: all its tokens, empty before the first new one. base, next_base: position of its first row in the newest
    run, and in the next one. slot: index in a pool. finished: no more of its tokens are returned. reason: why it has
    finished, "stop" or "length"; None before, and if it was cancelled or has failed. error: the exception that ended
    it.
    """

    cache: PromptCache
    picker: Picker
    stops: StopSequences.Matcher
    remaining: int
    k: int
    max_lookup: int
    stats: Stats
    longest: int
    uid: int
    tree: int = 0
    history: TokenHistory = field(default_factory=TokenHistory)
    base: int = field(init=False)
    next_base: int = field(init=False)
    slot: int = -1
    finished: bool = False
    reason: str | None = None
    error: Exception | None = None

    @property
    def all_tokens(self) -> list[int]:
        return self.history.exact()

    @property
    def most_drafts(self) -> int:
        """Maximum number of drafts of a cycle, of any source."""
        return max(self.k, self.max_lookup, self.most_forced, self.tree - 1)

    @property
    def most_forced(self) -> int:
        """Maximum number of drafts of its grammar per cycle; 0 without a grammar."""
        return self.picker.matcher.most if self.picker.matcher else 0

    def append(self, tokens: list[int]) -> int:
        """Append tokens up to the sequence's end; return their number.

        The end is a stop sequence, with a grammar the end of text, or the maximum number of tokens: `finished` and
        `reason` are then set, and later tokens are dropped.
        """
        ends = self.picker.matcher.eos if self.picker.matcher else ()
        for count, token in enumerate(tokens, 1):
            stopped = self.stops.advance(token) or token in ends
            if stopped or count == self.remaining:
                self.finished, self.reason = True, "stop" if stopped else "length"
                break
        self.remaining -= count
        self.history.extend(tokens[:count])
        return count

    def fail(self, error: Exception) -> None:
        """End this sequence and store the exception that ended it in `error`; raises nothing."""
        self.error, self.finished = error, True


class Asked(NamedTuple):
    """Options of `generate_step` about drafts. plain: num_draft_tokens is 0."""

    plain: bool
    adaptive: bool
    prompt_lookup: bool | None
    grammar_drafts: int | None
    tree: int | None = None


def new_sequence(
    cache: PromptCache,
    prompt: int,
    picker: Picker,
    stops: StopSequences | list[list[int]],
    max_tokens: int,
    k: int,
    stats: Stats,
    *,
    asked: Asked,
    grammar: Constraint | None,
    uid: int = 0,
    longest: int = 0,
) -> Sequence:
    """Return a sequence before its prompt of `prompt` tokens is prefilled.

    picker: without the matcher of `grammar`. k: maximum drafts of the drafter. uid, longest: fields of `Sequence`.
    Raises ValueError for drafts that the cache excludes.
    """
    tree = tree_rows(cache, picker, k, adaptive=asked.adaptive, asked=asked.tree)
    lookup = lookup_drafts(cache, k, plain=asked.plain, adaptive=asked.adaptive, asked=asked.prompt_lookup)
    forced = forced_drafts(cache, plain=asked.plain, asked=asked.grammar_drafts)
    picker.matcher = grammar.matcher(cache.offset + prompt, forced, stats) if grammar else None
    stats.expect(k, prompt, max_tokens)
    stops = stops if isinstance(stops, StopSequences) else StopSequences(stops)
    return Sequence(cache, picker, stops.matcher(), max_tokens, k, lookup, stats, longest, uid, tree)


def first_tokens(model: Target, sequence: Sequence, hidden: mx.array) -> tuple[Run, list[int]]:
    """Return the run that chose the token after a prompt with hidden rows [1, L, H], and that token in a list.

    The sequence's history begins with the prompt.
    """
    sequence.history = TokenHistory(sequence.cache.ids, sequence.cache.tokens)
    found = without_refused(model, _first_tokens, model, sequence, hidden)
    sequence.stats.note_first_token()
    return found


def _first_tokens(model: Target, sequence: Sequence, hidden: mx.array) -> tuple[Run, list[int]]:
    run = first_run(model, sequence.cache, hidden, sequence.picker)
    run_first(model)
    return run, evaluated(run.read)[0][0]
