"""Record cycles once (`mx.compile`) and replay them: the host walks a list of primitives and runs no Python.

What happens rarely stays outside: buffers grow, idle heads wake up and read. So does the search of the text.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..layers.target import Target
from ..tuning.controller import Plan
from ..tuning.replay_choice import CompileChoice
from .cycle import Decoder, Flight
from .draft import Run
from .prefill import NO_DRAFTS, NONE_ACCEPTED
from .recording import Kind, recorded

OFTEN = 3  # times that a kind of cycle has come when it is recorded, which takes as long as many cycles
KEPT = 16  # recorded kinds, of which each holds its graph
COUNTED = 256  # kinds whose occurrences are counted


class Recorder:
    """The recorded cycles of one model, the one used last at the end, and whether replaying them is faster.

    They hold the model's parameters: those of a model that has changed are let go when it next generates.
    """

    def __init__(self):
        self.cycles: dict[Kind, Callable] = {}
        self.seen: Counter[Kind] = Counter()
        self.verdict: bool | None = None
        self._state: list = []

    def __reduce__(self):
        return Recorder, ()  # a copy of the model records its own

    def fit(self, model: Target) -> None:
        """Forget what was recorded of another state of the model, or in another thread, which has its own streams."""
        state = [threading.get_ident(), str(mx.default_device()), *_state(model)]
        if len(state) != len(self._state) or not all(map(_same, state, self._state)):
            self.cycles.clear()
            self._state = state

    def find(self, model: Target, kind: Kind) -> tuple[Callable | None, bool]:
        """Find the cycle of a kind, None where it has not come often enough, and whether this call records it."""
        step = self.cycles.pop(kind, None)
        new = step is None
        if step is None:
            if len(self.seen) > COUNTED:
                self.seen.clear()
            self.seen[kind] += 1
            if self.seen[kind] < OFTEN:
                return None, False
            step = mx.compile(partial(recorded, weakref.ref(model), kind))
        self.cycles[kind] = step
        if len(self.cycles) > KEPT:
            del self.cycles[next(iter(self.cycles))]
        return step, new


class Compiled:
    """The replay of one generation's cycles, of those that can be."""

    def __init__(self, recorder: Recorder, choice: CompileChoice):
        self.recorder, self.choice = recorder, choice
        self._spoilt = 0  # coming cycles whose time holds a recording, or its compilation

    def run(self, d: Decoder, last: Flight, plan: Plan) -> Run | None:
        """Do what `cycle.propose` and `verify` do for the cycle after `last`; None where it is to be built."""
        heads = d.cache.heads if plan.k and plan.source == "heads" else []
        caches = [*d.cache.layers, *heads]
        if plan.p_min or not self.choice.on or not all(c.parts for c in caches):
            return None
        kind = Kind.of(d, last, plan, caches)
        step, new = self.recorder.find(d.model, kind)
        if step is None:
            return None
        if new:
            d.stats.compiled_shapes += 1
            self._spoilt = 2
        return _replay(step, kind, d, last)

    def observe(self, flight: Flight, seconds: float | None, waited: float) -> float | None:
        """Learn from a cycle, in which the host waited so many of its seconds; None where these tell nothing."""
        if self._spoilt:
            self._spoilt -= 1
            return None
        like = flight.plan, flight.run.tokens.size
        self.choice.observe(like, flight.replayed, seconds, waited)
        return seconds

    def found(self) -> bool:
        """Tell whether the replay trial has ended in this generation, and give the recorder its verdict."""
        if not self.choice.tried or self.choice.verdict is None:
            return False
        self.recorder.verdict = self.choice.verdict
        if not self.recorder.verdict:
            self.recorder.cycles.clear()
        return True


def _replay(step: Callable, kind: Kind, d: Decoder, last: Flight) -> Run:
    cache, run, k = d.cache, last.run, kind.plan.k
    if kind.heads:
        cache.wake(last.base)
    else:
        cache.idle(last.base)
        cache.to_device()
    heads = cache.heads if kind.heads else []
    given = [run.hidden, run.tokens, *([run.accepted] if run.drafts.size else [])]
    guesses = []
    if k and not heads:
        guesses.append(d.text.continued(last.base + 1, run.tokens, run.accepted + 1, k))
    ends = [c.offset for c in (cache.layers[0], *heads[:1])]
    parts = [c.parts for c in (*cache.layers, *heads)]
    made, offset, parts, kept = step(given, guesses, ends, parts, cache.kept if heads else [], d.picker.key)
    for c, arrays in zip((*cache.layers, *heads), parts, strict=True):
        c.parts = tuple(arrays)
    limit = last.base + kind.rows
    for c in cache.layers:
        c.seek(offset, limit + k + 1)
    for c in heads:  # where the target stood
        c.seek(ends[0], limit)
    if heads:
        cache.kept = list(kept)
    return Run(**{"accepted": NONE_ACCEPTED, "drafts": NO_DRAFTS.tokens, "logprobs": None, **made})


def _state(model: Target) -> list:
    """List what recorded cycles hold of a model: parameters, modules' kinds, and which kernels are on."""
    found = [array for _, array in tree_flatten(model.parameters())]  # type: ignore[union-attr]
    for module in model.modules():
        found.append(type(module))
        for value in vars(module).values():
            for part in (value, *getattr(value, "quantized", ())):
                sets = vars(part).values() if hasattr(part, "__dict__") else (part,)
                found += [each for each in sets if isinstance(each, frozenset)]
    return found


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and not isinstance(a, mx.array) and a == b)
