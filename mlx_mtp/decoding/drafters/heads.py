"""Draft with a model's MTP heads, and prefill them with accepted rows after a pause.

x_t is the token at position t, h_t the target's hidden state after reading it. Slot p of depth j reads x_{p+1+j}
and, at depth 0, h_p, at depth j > 0 depth j-1's output at slot p; its logits predict x_{p+2+j}. A slot that was
computed from drafted tokens is computed again from the accepted ones, so that drafts and hidden states equal a
recomputation from scratch (DeepSeek-V3, arXiv 2412.19437; transformers' `MTPCandidateGenerator` does the same).
"""

from typing import Any

import mlx.core as mx

from ...cache.step_cache import StepCache
from ...layers.target import Target
from ..draft_sampling import Choosers, Draft, HeadOutput, joined
from ..head_paths import HeadPaths
from ..picture_rows import next_embeddings, place_head
from ..run import Drafts, Run, rows_at
from ..tree_levels import grown
from .drafter import Drafter, Frame


class Heads(Drafter):
    """The MTP heads of a model: chained, all reading the target, or one recycled head, which reads its own output."""

    source = "heads"
    trees = True

    def __init__(self, model: Target):
        self.most, self.windows, self.reads = model.max_draft_tokens, model.head_windows(), model.taps
        self.chained = len(self.windows)

    @classmethod
    def of(cls, model: Target) -> "Heads | None":
        """Return the drafter of a model that has heads, else None."""
        return cls(model) if getattr(model, "mtp", None) else None

    def propose(self, frame: Frame, run: Run, k: int) -> Drafts:
        """Feed every head the run's rows and return k drafts of each sequence.

        All R rows are fed, accepted or not, so that shapes do not depend on the accepted count; a head's draft is in
        its row `last` + depth. Depths from k on read the rows but draft nothing. A recycled head drafts the remaining
        tokens from its own output. The heads' offset ends at the target's: the next call overwrites rejected rows.
        A tree's rows are read in copies of the heads' caches.
        """
        model, cache = frame.model, frame.cache
        choose = Choosers(model, frame.members, frame.allowed, confidence=frame.plan.p_min > 0)
        rows, accepted, choices = run.size, run.last, list[Draft]()
        if nodes := k if frame.plan.tree else 0:
            k = 1  # all heads read the rows before a tree's other drafts are made
        tokens, hidden, kept = run.tokens, model.capture(run.hidden), []
        first, row = cache.layers[0].offset + 1, (feedback := hidden)
        for depth, (head, kv) in enumerate(zip(model.mtp, cache.heads, strict=False)):
            fed = rows + depth if depth < k else rows
            output = head(model.embed(tokens[:, :fed], depth), hidden[:, :fed], kv)
            feedback = head.feedback(output, hidden[:, :fed])
            if depth < k:
                answer = accepted + depth
                row = rows_at(output, answer)
                choices.append(choose(HeadOutput(model, depth, row), first + depth, depth))
                if depth + 1 < min(k, len(cache.heads)):
                    tokens = _put(tokens, answer + 1, choices[-1].token)
            if depth + 1 < len(cache.heads):
                hidden = mx.concatenate([cache.kept[depth], feedback], axis=1)
                kept.append(rows_at(feedback, accepted))
        cache.kept = kept
        if k > len(choices):
            choices += _recycled(model, cache, row, choices[0], k, choose)
        cache.heads_follow()
        if nodes:
            paths = HeadPaths(model, cache, rows_at(feedback, accepted))
            return grown(nodes, choose, HeadOutput(model, 0, row), first, paths, nodes)
        return joined(choices)

    def skip_to(self, cache: StepCache, first: int, rows: int) -> None:
        """Empty the heads' caches, which then read `rows` rows from position `first` on.

        Depth j reads depth j-1, and starts later by the window of depth j-1, or by one row if there are too few rows.
        """
        exact = rows >= sum(kv.window for kv in cache.heads)
        for kv in cache.heads:
            kv.start = first
            first += kv.window if exact else 1

    def read_rows(self, model: Target, cache: StepCache, hidden: mx.array, tokens: Any, first: int) -> None:
        """Read the rows into the caches of all depths."""
        end = first + hidden.shape[1]
        hidden, tokens = model.capture(hidden), mx.array(tokens)[None]
        kept, base = [], first
        for depth, (head, kv) in enumerate(zip(model.mtp, cache.heads, strict=False)):
            begin = min(max(base, kv.start), end)
            kv.seek(begin, begin)
            if begin < end:
                rows = hidden[:, begin - base : end - base]
                place_head(model, cache, kv, begin, end)
                output = head(next_embeddings(model, cache, tokens[:, begin - first :], begin + 1, depth), rows, kv)
                feedback = head.feedback(output, rows)
            else:
                feedback = hidden[:, :0]
            kv.seek(end, end)
            if depth + 1 < len(cache.heads):
                # Position i of the next depth reads this depth's output at i - 1.
                hidden, base = mx.concatenate([cache.kept[depth], feedback], axis=1), begin
                kept.append(hidden[:, -1:])
        cache.kept = kept


def _recycled(model: Target, cache: StepCache, row: mx.array, last: Draft, k: int, choose: Choosers) -> list[Draft]:
    """Return k - 1 more drafts of the one head, which reads its own output row [n, 1, H] and its last draft."""
    (head,), (kv,) = model.mtp, cache.heads
    offset, more = cache.layers[0].offset, []
    kv.seek(offset, kv.limit)  # directly after the accepted rows
    for depth in range(1, k):
        hidden = head.feedback(row, row)
        row = head(model.embed(last.token, 0), hidden, kv)
        last = choose(HeadOutput(model, 0, row), offset + 1 + depth, depth)
        more.append(last)
    return more


def _put(tokens: mx.array, index: mx.array, token: mx.array) -> mx.array:
    """Return `tokens` [n, R] with one more column, and with `token` [n, 1] written over column `index`, int32 [n]."""
    longer = mx.concatenate([tokens, token], axis=1)
    index = index if index.size == 1 else index[:, None]
    return mx.where(mx.arange(longer.shape[1]) == index, token, longer)
