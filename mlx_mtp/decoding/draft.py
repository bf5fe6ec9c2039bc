"""Let the MTP heads read committed rows (`prime`) and draft the next tokens (`draft`).

x_t is the token at position t, h_t the target's hidden state after reading it. Slot p of depth j reads x_{p+1+j}
and, at depth 0, h_p, at depth j > 0 depth j-1's output at slot p; its logits guess x_{p+2+j}. The rule for the
caches is exact: a slot that was computed from drafted tokens is computed again from the committed ones, so drafts
and hidden states equal a recomputation from scratch (DeepSeek-V3, arXiv 2412.19437; transformers'
`MTPCandidateGenerator` does the same).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx

from ..cache.prompt_cache import PromptCache
from ..layers.target import Target
from .draft_sampling import Choice

# (model, depth, a head's output row [1, 1, H], the position that it guesses) -> the draft
Chooser = Callable[[Any, int, mx.array, mx.array], Choice]


class Run(NamedTuple):
    """Rows that the target has verified: what one cycle hands to the next, all of it arrays.

    hidden:   [1, R, H] the target's hidden rows; row r is position base + r.
    tokens:   [R] int32, the target's own token after each row.
    accepted: int32 [1] on the device; rows 0..accepted are right, tokens[accepted] is the newest token.
    drafts:   [R-1] int32, what was verified; packed: tokens and, behind drafts, accepted, for the host. These two and
              logprobs [R, V], if asked for, are for the host: the next cycle does without.
    """

    hidden: mx.array
    tokens: mx.array
    accepted: Any
    drafts: Any = None
    packed: Any = None
    logprobs: Any = None

    @classmethod
    def of(cls, hidden, tokens, accepted, drafts, logprobs) -> "Run":
        packed = mx.concatenate([tokens, accepted]) if drafts.size else tokens
        return cls(hidden, tokens, accepted, drafts, packed, logprobs)

    @property
    def size(self) -> int:
        """Rows that were verified."""
        return self.tokens.size

    @property
    def given(self) -> "Run":
        """What the next cycle gets; no constant, which `mx.compile` does not allow among inputs."""
        return Run(self.hidden, self.tokens, self.accepted if self.size > 1 else None)

    def newest(self) -> mx.array:
        """Return the token that the target has not read yet, int32 [1]."""
        return mx.take(self.tokens, self.accepted) if self.size > 1 else self.tokens

    def logprobs_of(self, row: int) -> mx.array | None:
        """Return the logprobs [V] of a row, None where nobody asked for them."""
        if self.logprobs is None:
            return None
        logprobs = self.logprobs[row]
        mx.async_eval(logprobs)  # now, in this turn: the caller has none
        return logprobs

    def read(self) -> tuple[list[int], int]:
        """Wait for the run; return its right tokens and how many of them are drafts."""
        values: Any = self.packed.tolist()
        return (values[: values[-1] + 1], values[-1]) if len(values) > 1 else (values, 0)


class Drafts(NamedTuple):
    """k drafted tokens.

    tokens:     [k] int32.
    confidence: [k] float32, the heads' probability of each token at temperature 1; None where it was not asked for.
    """

    tokens: mx.array
    confidence: mx.array | None = None

    @classmethod
    def of(cls, choices: list[Choice]) -> "Drafts":
        tokens = mx.stack([choice.token for choice in choices]) if choices else mx.zeros(0, mx.int32)
        confidence = [choice.confidence for choice in choices if choice.confidence is not None]
        return cls(tokens, mx.stack(confidence) if confidence else None)

    def first(self, n: int) -> "Drafts":
        """Keep the first n drafts."""
        return Drafts(self.tokens[:n])


# Of values, not of an operation, whose stream would be that of the thread that imports this.
NONE_ACCEPTED = mx.array([0], mx.int32)
NO_DRAFTS = Drafts(mx.array([], mx.int32))


def draft(model: Target, cache: PromptCache, run: Run, k: int, chooser: Chooser) -> Drafts:
    """Feed every head the run's rows and return k drafts, each token chosen by `chooser`.

    All R rows are fed, right or not, so that shapes do not depend on what was accepted; a head's answer is its
    row `accepted` + depth. Depths from k on read the rows but draft nothing. A recycled head drafts the rest from its
    own output. Leaves the heads' offset at the target's: the next call overwrites rejected and drafted rows.
    """
    rows, accepted = run.size, NONE_ACCEPTED if run.accepted is None else run.accepted
    tokens, hidden, kept = run.tokens, model.capture(run.hidden), []
    first, choices = cache.layers[0].offset + 1, []
    for depth, (head, kv) in enumerate(zip(model.mtp, cache.heads, strict=False)):
        fed = rows + depth if depth < k else rows
        output = head(model.embed(tokens[None, :fed], depth), hidden[:, :fed], kv)
        feedback = head.feedback(output, hidden[:, :fed])
        if depth < k:
            answer = accepted + depth
            row = mx.take(output, answer, axis=1)
            choices.append(chooser(model, depth, row, first + depth))
            tokens = _put(tokens, answer + 1, choices[-1].token)
        if depth + 1 < len(cache.heads):
            hidden = mx.concatenate([cache.kept[depth], feedback], axis=1)
            kept.append(mx.take(feedback, accepted, axis=1))
    cache.kept = kept
    if k > len(choices):
        choices += _recycle(model, cache, row, choices[0], k, chooser)
    cache.heads_follow()
    return Drafts.of(choices)


def _recycle(
    model: Target, cache: PromptCache, row: mx.array, last: Choice, k: int, chooser: Chooser
) -> list[Choice]:
    """Draft on with the one head: its last output [1, 1, H] and draft are its next input; k - 1 more drafts."""
    (head,), (kv,) = model.mtp, cache.heads
    offset, more = cache.layers[0].offset, []
    kv.seek(offset, kv.limit)  # right behind the accepted rows
    for depth in range(1, k):
        hidden = head.feedback(row, row)
        row = head(model.embed(last.token.reshape(1, 1), 0), hidden, kv)
        last = chooser(model, 0, row, offset + 1 + depth)
        more.append(last)
    return more


def _put(tokens: mx.array, index: mx.array, token: mx.array) -> mx.array:
    """Put `token` into tokens [n] at a device-side index <= n: [n + 1]."""
    longer = mx.concatenate([tokens, token.reshape(1)])
    return mx.where(mx.arange(longer.size) == index, token, longer)


def prime(model: Target, cache: PromptCache, tokens: Any, first: int, end: int, *, step: int) -> None:
    """Let every head read positions first..end-1, `step` at a time, from the hidden rows that wait in the backlog.

    These begin at `first`, but of heads with windows, which may skip rows, they end at end-1; who skips any starts
    anew at `first`. Positions are host integers, and `tokens` [end + 1] are known; nothing is evaluated.
    """
    if not cache.heads or first >= end:
        return
    rows = mx.concatenate(cache.backlog, axis=1)
    if cache.reach is not None:
        rows = rows[:, first - end :]
    if first != cache.primed:
        _start_at(cache, first, end - first)
    hidden = model.capture(rows)
    for lo in range(first, end, step):
        hi = min(lo + step, end)
        _read(model, cache, hidden[:, lo - first : hi - first], tokens[lo : hi + 1], lo)
        cache.primed, cache.backlog = hi, [rows[:, hi - first :]]


def _start_at(cache: PromptCache, first: int, rows: int) -> None:
    """Empty the heads, which then read `rows` rows from position `first` on.

    Depth j reads what depth j-1 gave, so it starts behind it: by a whole window if there are rows enough, so that all
    it reads is as exact as if nothing had been skipped, else by one row.
    """
    exact = rows >= sum(kv.window for kv in cache.heads)
    for kv in cache.heads:
        kv.start = first
        first += kv.window if exact else 1


def _read(model: Target, cache: PromptCache, hidden: mx.array, text: Any, lo: int) -> None:
    """Let all depths read hidden rows [1, n, H] of positions lo..lo+n-1, whose `text` ends at token lo+n."""
    hi = lo + hidden.shape[1]
    tokens = mx.array(text[1:])[None]
    kept, base = [], lo
    for depth, (head, kv) in enumerate(zip(model.mtp, cache.heads, strict=False)):
        begin = min(max(base, kv.start), hi)
        kv.seek(begin, begin)
        if begin < hi:
            rows = hidden[:, begin - base : hi - base]
            output = head(model.embed(tokens[:, begin - lo :], depth), rows, kv)
            feedback = head.feedback(output, rows)
        else:
            feedback = hidden[:, :0]
        kv.seek(hi, hi)
        if depth + 1 < len(cache.heads):
            # Position i of the next depth reads this depth's output at i - 1.
            hidden, base = mx.concatenate([cache.kept[depth], feedback], axis=1), begin
            kept.append(hidden[:, -1:])
    cache.kept = kept
