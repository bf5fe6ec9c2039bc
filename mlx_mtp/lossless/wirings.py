"""Try other wirings of a checkpoint's heads in memory, and return those that predict more tokens correctly.

A wrongly wired head changes no output; it is only slow. The norm before the fusion hides a hidden state taken at the
wrong place, depths are similar, and some predictions are right in any wiring; only a comparison with others shows it.
"""

import itertools
import math
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ..checkpoint.parameters import named
from .heads import Known, Rights, right, shares

# Groups of norms that a converter may have shifted by one, or failed to.
NORMS = {
    "all norms": r"",
    "the norms of the block": r"block\.",
    "enorm and hnorm": r"[eh]norm\.",
    "enorm": r"enorm\.",
    "hnorm": r"hnorm\.",
    "the last norm": r"norm\.",
}
NO_NORM = r"$"
EVERY_ORDER = 3  # depths up to which all orders are tried; beyond it only swaps of two
LOST, WON = -3.0, 4.0  # standard deviations of the gain below which a wiring is dropped, above which it is better
BLOCK = 8  # positions whose gains are summed
Norms = list[tuple[str, mx.array]]  # a head's norms by their paths in it
LEAST_GAIN = 0.02  # minimum gain of a depth's share


@dataclass(frozen=True)
class Wiring:
    """A change of the heads' wiring; a field that has its default changes nothing.

    spec:     values that replace the MTPSpec's.
    depths:   the index of the head used at each depth.
    lm_heads: for each head, the index of the head whose LM head it uses; None is the target's.
    norms:    a regex of norms' paths in a head, and the value added to their weights.
    hidden:   offset, in positions, of the target's hidden states that the heads read; `on` does not apply it, but
        `Known.shifted` does.
    """

    name: str
    spec: dict[str, str] = field(default_factory=dict)
    depths: Sequence[int] = ()
    lm_heads: Sequence[int | None] = ()
    norms: tuple[str, int] | None = None
    hidden: int = 0

    def right(self, model: Any, text: Known, depths: int) -> list[mx.array]:
        """Return `heads.right` of a text with this wiring, of at most `depths` depths.

        A recycled head's second draft is included only where it depends on the wiring, through the feedback.
        """
        depths = depths if "feedback" in self.spec else min(depths, len(model.mtp))
        with self.on(model):
            return right(model, text.shifted(self.hidden) if self.hidden else text, depths)

    @contextmanager
    def on(self, model: Any) -> Generator[None, None, None]:
        """Apply the wiring, except `hidden`, to the heads of `model` inside the block; then restore them."""
        spec, heads = model.spec, list(model.mtp)
        path, shift = self.norms or (NO_NORM, 0)
        lm_heads, norms = [head.get("head") for head in heads], [norms_of(head, path) for head in heads]
        others = [None if i is None else lm_heads[i] for i in self.lm_heads]
        shifted = [[(name, w + shift) for name, w in weights] for weights in norms]
        try:
            _wire(model, replace(spec, **self.spec), heads, others or lm_heads, shifted)  # type: ignore[arg-type]
            model.mtp = [heads[i] for i in self.depths] or heads
            yield
        finally:
            _wire(model, spec, heads, lm_heads, norms)


@dataclass(frozen=True)
class Better:
    """A better wiring, by name: the shares of right predictions per depth before and with it.

    sds: the gain in right predictions in its standard deviations.
    """

    wiring: str
    before: list[float]
    after: list[float]
    sds: float


def alternatives(model: Any) -> list[Wiring]:
    """Return the wirings to try for the model's heads; each differs from the model's own in one thing.

    More than EVERY_ORDER depths are only swapped in pairs.
    """
    spec, depths, found = model.spec, len(model.mtp), []
    fields = {"capture": ("pre", "post"), "fuse": ("eh", "he"), "feedback": ("pre", "post")}
    if depths > 1:
        fields["topology"] = ("chain", "target_each")
    for name, values in fields.items():
        own = getattr(spec, name)
        found += [Wiring(f"{name}={v!r} for {own!r}", {name: v}) for v in values if own in values and v != own]
    every = tuple(range(depths))
    if depths <= EVERY_ORDER:
        orders = list(itertools.permutations(every))[1:]
    else:
        orders = [tuple({a: b, b: a}.get(i, i) for i in every) for a, b in itertools.combinations(every, 2)]
    for order in orders:
        numbers = ", ".join(str(depth + 1) for depth in order)
        found.append(Wiring(f"depths in the order {numbers}", depths=order))
        if spec.head == "own":
            found.append(Wiring(f"LM heads of depths {numbers}", lm_heads=order))
    if spec.head == "own" and not any("d2t" in head for head in model.mtp):
        found.append(Wiring("head='shared' for 'own'", lm_heads=[None] * depths))
    found += [Wiring(f"the hidden state of the position {w}", hidden=by) for by, w in ((-1, "before"), (1, "behind"))]
    for name, path in NORMS.items():
        if any(norms_of(head, path) for head in model.mtp):
            found += [Wiring(f"{name} {shift:+d}", norms=(path, shift)) for shift in (1, -1)]
    return found


def diagnose(
    model: Any, texts: list[Known], own: Rights, wirings: Sequence[Any], progress: Callable[[int, int], None]
) -> list[Better]:
    """Return a Better per wiring that predicts clearly more tokens of these texts than the `own` one, best first.

    own: `right` of each text with the model's wiring, which is restored. wirings: each a Wiring or a BlockWiring.
    progress: called before each wiring with its index and their number.
    """
    found = []
    for i, wiring in enumerate(wirings):
        progress(i, len(wirings))
        found.append(_try(model, wiring, texts, own))
    return sorted(filter(None, found), key=lambda better: -better.sds)


def _try(model: Any, wiring: Any, texts: list[Known], own: Rights) -> Better | None:
    """Return the Better of `wiring`, compared with the model's own; None if it is not clearly better.

    The comparison stops at the first text after which the wiring is clearly worse.
    """
    found: Rights = []
    gains, sds = np.zeros(0), 0.0
    for text, before in zip(texts, own, strict=True):
        found.append(wiring.right(model, text, len(before)))
        gains = np.append(gains, _gains(before[: len(found[-1])], found[-1]))
        # Standard deviations of the sum, from blocks because neighbouring predictions are correlated.
        sds = float(gains.sum() / (math.sqrt((gains**2).sum()) or 1.0))
        if sds < LOST:
            return None
    was, now = shares([rights[: len(found[0])] for rights in own]), shares(found)
    gain = max(b - a for a, b in zip(was, now, strict=True))
    return Better(wiring.name, was, now, sds) if sds > WON and gain > LEAST_GAIN else None


def _gains(before: list[mx.array], after: list[mx.array]) -> np.ndarray:
    """Return a text's gain in right predictions, of all depths together, [blocks of BLOCK positions]."""
    total = np.zeros(-(-before[0].size // BLOCK) * BLOCK)
    for a, b in zip(before, after, strict=True):
        total[: a.size] += np.array(b, dtype=int) - np.array(a, dtype=int)
    return total.reshape(-1, BLOCK).sum(axis=1)


def norms_of(head: Any, path: str) -> Norms:
    """Return the weights of a module's norms whose paths match a regex, by path."""
    return [(name, w) for name, w in named(head).items() if name.endswith("norm.weight") and re.match(path, name)]


def _wire(model: Any, spec: Any, heads: list[Any], lm_heads: list[Any], norms: list[Norms]) -> None:
    """Set a model's spec and heads and, in each head, its spec, LM head and norms.

    lm_heads: None is the target's. norms: for each head, its (path in the head, weight).
    """
    model.spec, model.mtp = spec, heads
    for head, lm_head, weights in zip(heads, lm_heads, norms, strict=True):
        head._spec = spec
        head.pop("head", None)
        if lm_head is not None:
            head.head = lm_head
        head.load_weights(weights, strict=False)
