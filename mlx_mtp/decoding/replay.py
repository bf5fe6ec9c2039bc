"""Record a cycle's step once (`mx.compile`) and replay it: the host walks a list of primitives and runs no Python.

A recorded step depends on its `Kind`; all else is its input. Positions that the host bounds are bounded by the end of
a buffer's STEP, so that one record serves every cycle until there, in this conversation and in others. What happens
rarely stays outside: buffers grow, idle heads wake up and read. So does the search of the text.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache.growing import round_up
from ..cache.kinds import from_configs
from ..cache.prompt_cache import CacheArrays, PromptCache
from ..layers.target import Target
from ..tuning.plan import Plan
from ..tuning.replay_choice import CompileChoice
from .draft import Drafts, Run
from .sampling import Picker, Sampling
from .step import Frame, step

OFTEN = 2  # times that a kind of cycle has come when it is recorded: one that comes once is not worth it
KEPT = 4  # kinds recorded in a thread: on a GPU each holds its launches' sources, 11 MB of Step-3.5's
THREADS = 4  # whose records are kept: what MLX compiles in one thread, others cannot call
COUNTED = 256  # kinds whose occurrences are counted


class Kind(NamedTuple):
    """All that a recorded step depends on besides the values of its inputs.

    rows: of the run before. end: a bound of all positions. context: the caches' one. layers, heads: their `config`s,
    no heads where they are idle. shapes: of all caches' arrays. pick: how tokens are chosen.
    """

    plan: Plan
    rows: int
    end: int
    context: int
    layers: tuple
    heads: tuple
    shapes: tuple
    pick: tuple[Sampling, bool, str]

    @classmethod
    def of(cls, frame: Frame, rows: int, caches: Sequence[Any]) -> "Kind":
        """Name the step of a frame, and give its caches room, all at once, so that they have one end."""
        base, plan, picker, n = frame.base, frame.plan, frame.picker, len(frame.cache.layers)
        end = round_up(base + rows + plan.k + 1)
        for c in caches:
            c.hold(end)
        layouts = tuple(_layout(c, base) for c in caches)
        shapes = tuple(part.shape for c in caches for part in c.parts)
        pick = picker.options, picker.logprobs, picker.draft_sampling
        return cls(plan, rows, end, frame.cache.layers[0].context, layouts[:n], layouts[n:], shapes, pick)


def _layout(c: Any, base: int) -> tuple:
    """Return a cache's `config`, without a start that is not behind the first position of `base`'s window."""
    config = c.config
    if c.wraps and c.start <= base - c.window + 1:
        config["start"] = 0
    return tuple(config.items())


def recorded(
    model_ref: "weakref.ref[Target]", kind: Kind, run: Run, arrays: CacheArrays, guesses: Drafts, *, key: mx.array
) -> tuple[Run, CacheArrays]:
    """Take the step of a kind on caches of its own, which stand in for a conversation's."""
    model, n = model_ref(), len(kind.layers)
    assert model is not None
    caches = from_configs([dict(config) for config in (*kind.layers, *kind.heads)])
    cache = PromptCache(model, caches[:n], caches[n:], None, [])
    cache.begin(kind.context)
    cache.live = bool(kind.heads)
    options, logprobs, draft_sampling = kind.pick
    picker = Picker(options, logprobs=logprobs, key=key, draft_sampling=draft_sampling)
    base = kind.end - kind.rows - kind.plan.k - 1
    return step(Frame(model, cache, kind.plan, picker, base), Run(*run), CacheArrays(*arrays), Drafts(*guesses))


class Recorder:
    """The recorded steps of one model by thread, the one used last at the end, and whether replaying them is faster.

    They hold the model's parameters: those of a model that has changed are let go when it next generates.
    """

    def __init__(self):
        self.cycles: dict[tuple[threading.Thread, Any], Callable] = {}
        self.seen: Counter[tuple[threading.Thread, Any]] = Counter()
        self.verdict: bool | None = None
        self._state: list = []

    def __reduce__(self):
        return Recorder, ()  # a copy of the model records its own

    def fit(self, model: Target) -> None:
        """Forget what was recorded of another state of the model, or for another device."""
        state = [str(mx.default_device()), *_state(model)]
        if len(state) != len(self._state) or not all(map(_same, state, self._state)):
            self.cycles.clear()
            self._state = state

    def find(self, model: Target, kind: Any, record: Callable, kept: int) -> tuple[Callable | None, bool]:
        """Find the step of a kind, None where it has not come often enough here, and whether this call records it.

        record: the function of (weak reference to the model, kind, arrays ...) that is recorded. kept: most kinds of
        this type that a thread has recorded.
        """
        thread = threading.current_thread()  # no number, which another thread may have when this one has ended
        found = self.cycles.pop(key := (thread, kind), None)
        new = found is None
        if found is None:
            if len(self.seen) > COUNTED:
                self.seen.clear()
            self.seen[key] += 1
            if self.seen[key] < OFTEN:
                return None, False
            found = mx.compile(partial(record, weakref.ref(model), kind))
        self.cycles[key] = found
        alike = [key for key in self.cycles if type(key[1]) is type(kind)]
        here = [key for key in alike if key[0] == thread]
        if len(here) > kept or len(alike) > THREADS * kept:
            oldest = here[0] if len(here) > kept else alike[0]
            self.seen[oldest] = 0
            del self.cycles[oldest]
        return found, new


class Compiled:
    """The replay of one generation's cycles, of those that can be. shapes: kinds that it has recorded."""

    def __init__(self, recorder: Recorder, choice: CompileChoice):
        self.recorder, self.choice, self.shapes = recorder, choice, 0
        self._spoilt = 0  # coming cycles whose time holds a recording, or its compilation

    def find(self, frame: Frame, rows: int) -> Callable | None:
        """Find what does as `step` does with this frame behind `rows` rows; None where that is to be built."""
        plan, cache = frame.plan, frame.cache
        caches = [*cache.layers, *(cache.heads if plan.k and plan.source == "heads" else [])]
        if plan.p_min or not self.choice.on or not all(c.parts for c in caches):
            return None
        found = self.recall(frame.model, Kind.of(frame, rows, caches), recorded, KEPT)
        return found and partial(found, key=frame.picker.key)

    def recall(self, model: Target, kind: Any, record: Callable, kept: int) -> Callable | None:
        """Find the step of a kind as `Recorder.find` does, or record it."""
        found, new = self.recorder.find(model, kind, record, kept)
        self.shapes += new
        self._spoilt = 2 if new else self._spoilt
        return found

    def observe(self, plan: Plan, rows: Any, replayed: bool, seconds: float | None) -> float | None:
        """Learn from a cycle's seconds; None where these tell nothing. rows: of it, or what else its like have."""
        if self._spoilt:
            self._spoilt -= 1
            return None
        self.choice.observe((plan, rows), replayed, seconds)
        return seconds

    def found(self) -> bool:
        """Tell whether the replay trial has ended in this generation, and give the recorder its verdict."""
        if not self.choice.tried or self.choice.verdict is None:
            return False
        self.recorder.verdict = self.choice.verdict
        if not self.recorder.verdict:
            self.recorder.cycles.clear()
        return True


def _state(model: Target) -> list:
    """List what recorded steps hold of a model: parameters, modules' kinds, and which kernels are on."""
    found = [array for _, array in tree_flatten(model.parameters())]  # type: ignore[union-attr]
    for module in model.modules():
        found.append(type(module))
        for value in vars(module).values():
            for part in (value, *getattr(value, "quantized", ())):
                sets = vars(part).values() if hasattr(part, "__dict__") else (part,)
                found += [each for each in sets if isinstance(each, frozenset)]
                found += getattr(part, "rows_of_context", {}).values()
    return found


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and not isinstance(a, mx.array) and a == b)
