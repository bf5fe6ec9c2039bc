"""Measure how often each depth predicts the target's token on given texts, without drafting or verifying.

Depth j at position p reads the true token p + 1 + j and its wired input from the text before it. Its prediction is
compared with the target's own at position p + 2 + j. So each depth is judged alone, at every position.
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
import numpy as np

from ..cache.kinds import make_caches
from ..checkpoint.parameters import named, same
from ..layers.target import Target
from .rounding_judge import greedy

Rights = list[list[mx.array]]  # results of `right`, by text and depth
USUAL = 0.3  # lowest plausible share of depth 1; released heads are right in 60-97%
CLEARLY = 4.0  # standard deviations
LONGEST = 1024  # positions of a text
RECYCLED = 96  # positions of a text at which a recycled head reads its own output


@dataclass(frozen=True)
class Known:
    """A text of L tokens, the target's hidden rows [1, L, H], and its greedy token after each, int32 [L]."""

    tokens: mx.array
    hidden: mx.array
    predicted: mx.array

    @classmethod
    def of(cls, tokens: list[int], hidden: mx.array, predicted: list[int]) -> "Known":
        n = LONGEST
        return cls(mx.array(tokens[:n]), hidden[:, :n], mx.array(predicted[:n]))

    def shifted(self, by: int) -> "Known":
        """Return the text with the hidden row at each position replaced by the one `by` positions later.

        At the ends of the text, the last or first row is repeated.
        """
        length = self.tokens.size
        return replace(self, hidden=self.hidden[:, mx.clip(mx.arange(length) + by, 0, length - 1)])


def right(model: Target, text: Known, depths: int) -> list[mx.array]:
    """Return per depth, from 0, whether its prediction is right at each position: boolean [L - 1 - depth] or empty.

    depths: number of depths, from the first. If the model has one head, which is recycled, and `depths` is greater,
    the last item is that of `right_recycled`. The others are evaluated.
    """
    found, length = [], text.tokens.size
    hidden = model.capture(text.hidden)
    for depth, head in enumerate(model.mtp[:depths]):
        if (rows := length - 1 - depth) < 1:
            found.append(mx.zeros(0, mx.bool_))
            continue
        (cache,) = make_caches([head.window], starts=[0])
        fed = hidden[:, :rows]
        output = head(model.embed(text.tokens[None, 1 + depth :], depth), fed, cache)
        found.append(_predictions(model, depth, output) == text.predicted[1 + depth :])
        hidden = head.feedback(output, fed)
    mx.eval(found)
    return [*found, right_recycled(model, text)] if depths > len(model.mtp) else found


def right_recycled(model: Target, text: Known) -> mx.array:
    """Return, as `right`, whether a recycled head's second draft, from its own output, is right at each position.

    Boolean [min(RECYCLED, L - 2)], or empty, for the first positions. The model must have one head.
    """
    (head,), hidden = model.mtp, model.capture(text.hidden)
    (cache,) = make_caches([head.window], starts=[0])
    tokens, found = text.tokens[None], []
    for p in range(min(RECYCLED, text.tokens.size - 2)):
        cache.seek(p, p)  # overwrites the last prediction's row
        fed = hidden[:, p : p + 1]
        output = head(model.embed(tokens[:, p + 1 : p + 2]), fed, cache)
        output = head(model.embed(tokens[:, p + 2 : p + 3]), head.feedback(output, fed), cache)
        found.append(_predictions(model, 0, output) == text.predicted[p + 2])
        mx.eval(found[-1])
    return mx.concatenate(found) if found else mx.zeros(0, mx.bool_)


def shares(found: Rights) -> list[float]:
    """Return the share of right predictions per depth, over all texts; 0 for a depth without predictions."""
    depths = [mx.concatenate(list(depth)) for depth in zip(*found, strict=True)]
    return [depth.astype(mx.float32).mean().item() if depth.size else 0.0 for depth in depths]  # type: ignore[misc]


def kept(found: list[mx.array], start: int, new: int, k: int) -> int:
    """Return the number of accepted drafts if `new` greedy tokens follow `start` tokens, at most k drafts per cycle.

    found: per depth, the positions at which predictions are right, from `right`. A cycle accepts drafts up to its
    first wrong one, and none beyond the last token.
    """
    rights = [np.array(depth) for depth in found[:k]]
    row, last, total = start - 1, start + new - 1, 0
    while row + 1 < last:
        drafts = (depth[row] for depth in rights[: last - row - 1])
        n = sum(1 for _ in itertools.takewhile(bool, drafts))
        row, total = row + n + 1, total + n
    return total


def suspicions(model: Target, found: Rights) -> list[str]:
    """Return warnings about the heads that follow from their shares of right predictions, and from equal weights."""
    share, modules = shares(found), len(model.mtp)
    warnings = []
    if share[0] < USUAL:
        warnings.append(f"depth 1 is right in {share[0]:.0%} of cases; released heads are in 60-97%")
    for depth in range(1, modules):
        a, b = share[depth - 1 : depth + 1]
        n = sum(text[depth].size for text in found)
        sd = math.sqrt(2 * max(b * (1 - b), 1e-9) / max(n, 1))
        order = "more often than" if b - a > CLEARLY * sd else "less than half as often as" if b < a / 2 else ""
        if order:
            warnings.append(f"depth {depth + 1} is right {order} depth {depth} ({b:.0%}, {a:.0%})")
    for i, j in itertools.combinations(range(modules), 2):
        for part, name in (("block", "layer"), ("head", "LM head")):
            if part in model.mtp[i] and same(named(model.mtp[i][part]), named(model.mtp[j][part])):
                warnings.append(f"depths {i + 1} and {j + 1} have the same {name}")
    return warnings


def _predictions(model: Target, depth: int, output: mx.array) -> mx.array:
    """Return the greedy predictions [L] for a head's output rows [1, L, H]."""
    return model.mtp[depth].token(greedy(partial(model.draft_logits, depth), output))
