"""Record a step once (`mx.compile`) and replay it: the host walks a list of primitives and runs no Python.

A recorded step depends on its `Kind`; all else is its input. Positions that the host bounds are bounded by the end of
a buffer's STEP, so that one record serves every step until there, in this conversation and in others, whoever the
sequences of a pool are. What happens rarely stays outside: buffers grow, idle heads wake up and read. So does what is
drafted from text that the host has read.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache.growing import round_up
from ..cache.prompt_cache import PromptForm
from ..cache.step_cache import CacheArrays, CacheForm
from ..kernels import source_bytes
from ..layers.target import Target
from ..tuning.plan import Plan
from ..tuning.replay_choice import CompileChoice
from .drafters import drafter_of
from .drafters.drafter import Frame
from .members import Single
from .run import Drafts, Run
from .sampling import Picker, Sampling
from .stats import Stats
from .step import step

OFTEN = 2  # times that a kind of step has come when it is recorded: one that comes once is not worth it
KEPT = 32  # kinds recorded in a thread, of one sequence and of several
HELD = 80 * 2**20  # bytes of launches' sources in all that is recorded: each kind holds 13 MB of Step-3.5's on a GPU
HELD_TOGETHER = 3 * HELD  # the same of steps of several: few are too few where sequences come and go
THREADS = 4  # whose records are kept: what MLX compiles in one thread, others cannot call
COUNTED = 256  # kinds whose occurrences are counted


class Kind(NamedTuple):
    """All that a recorded step depends on besides the values of its inputs.

    drafts: whether the drafter has a part in it. rows: of the run before. end: a bound of all positions. form: of the
    caches. shapes: of all their arrays. pick: how tokens are chosen, in each row alike.
    """

    plan: Plan
    drafts: bool
    rows: int
    end: int
    form: CacheForm
    shapes: tuple
    pick: tuple[Sampling, bool, str]

    @classmethod
    def of(cls, frame: Frame, rows: int, pick: tuple[Sampling, bool, str]) -> "Kind":
        """Name the step of a frame, and give its caches room, all at once, so that they have one end."""
        end, caches = _end(frame, rows), frame.cache.stepped
        for c in caches:
            c.hold(end)
        shapes = tuple(part.shape for c in caches for part in c.parts)
        return cls(frame.plan, frame.drafter is not None, rows, end, frame.cache.form(), shapes, pick)


def rounded(frame: Frame, rows: int) -> Frame:
    """Bound positions by the end of a STEP, built or replayed, so that both have the same bits."""
    return frame._replace(base=_end(frame, rows) - rows - frame.plan.k - 1)


def _end(frame: Frame, rows: int) -> int:
    return round_up(frame.base + rows + frame.plan.k + 1)


def recorded(
    model_ref: "weakref.ref[Target]",
    kind: Kind,
    run: Run,
    arrays: CacheArrays,
    guesses: Drafts,
    most: mx.array | None = None,
    *,
    keys: list[mx.array],
    starts: Any,
) -> tuple[Run, CacheArrays]:
    """Take the step of a kind on caches of its own, which stand in for those of some conversations."""
    model = model_ref()
    assert model is not None
    cache = kind.form.made(model)
    cache.starts = starts
    options, logprobs, draft_sampling = kind.pick
    pickers = [Picker(options, logprobs=logprobs, key=key, draft_sampling=draft_sampling) for key in keys]
    base = kind.end - kind.rows - kind.plan.k - 1
    drafter = drafter_of(model) if kind.drafts else None
    frame = Frame(model, cache, kind.plan, drafter, [Single(picker) for picker in pickers], base)
    return step(frame, Run(*run), CacheArrays(*arrays), Drafts(*guesses), most)


class Bounds(NamedTuple):
    """What may be kept recorded of one type of kinds: so many in a thread, and bytes of sources that all hold."""

    kinds: int
    held: int


class Record(NamedTuple):
    """A step that MLX records when it is first called.

    held: one entry, the bytes of launches' sources that it holds from then on.
    """

    take: Callable
    held: list[int]

    @classmethod
    def of(cls, step: Callable) -> "Record":
        held = [0]
        return cls(mx.compile(partial(_measured, step, held)), held)


def _measured(step: Callable, held: list[int], *args: Any, **more: Any) -> Any:
    """Take a step while MLX records it, and note what its launches hold."""
    before = source_bytes()
    found = step(*args, **more)
    held[:] = [source_bytes() - before]
    return found


class Recorder:
    """The recorded steps of one model by thread, the one used last at the end, and whether replaying them is faster.

    They hold the model's parameters: those of a model that has changed are let go when it next generates.
    """

    def __init__(self):
        self.cycles: dict[tuple[threading.Thread, Any], Record] = {}
        self.seen: Counter[tuple[threading.Thread, Any]] = Counter()
        self.verdict: bool | None = None
        self._state: list = []

    def __reduce__(self):
        return Recorder, ()  # a copy of the model records its own

    def drop(self) -> None:
        """Drop what was recorded, which holds the launches of a graph that failed."""
        self.cycles.clear()

    def fit(self, model: Target) -> None:
        """Forget what was recorded of another state of the model, or for another device."""
        state = [str(mx.default_device()), getattr(model, "drafter", None), *_state(model)]
        if len(state) != len(self._state) or not all(map(_same, state, self._state)):
            self.cycles.clear()
            self._state = state

    def find(self, model: Target, kind: Kind, record: Callable, most: Bounds) -> tuple[Callable | None, bool]:
        """Find the step of a kind, None where it has not come often enough here, and whether this call records it.

        record: the function of (weak reference to the model, kind, arrays ...) that is recorded. most: that is kept
        of kinds of this type.
        """
        thread = threading.current_thread()  # no number, which another thread may have when this one has ended
        found = self.cycles.pop(key := (thread, kind), None)
        if found is not None:
            self.cycles[key] = found
            return found.take, False
        if len(self.seen) > COUNTED:
            self.seen.clear()
        self.seen[key] += 1
        if self.seen[key] < OFTEN:
            return None, False
        self.cycles[key] = found = Record.of(partial(record, weakref.ref(model), kind))
        while oldest := self._beyond(key, most):
            self.seen[oldest] = 0
            del self.cycles[oldest]
        return found.take, True

    def _beyond(self, new: tuple[threading.Thread, Any], most: Bounds) -> tuple[threading.Thread, Any] | None:
        """Find the kind of a type to let go of beside a new one: who was used longest ago, if they are too many.

        The new one is thought to hold as much as any.
        """
        alike = [key for key in self.cycles if type(key[1].form) is type(new[1].form)]
        here = [key for key in alike if key[0] == new[0]]
        if len(here) > most.kinds:
            return here[0]
        sizes = [self.cycles[key].held[0] for key in alike]
        many = len(alike) > THREADS * most.kinds or (len(alike) > 1 and sum(sizes) + max(sizes) > most.held)
        return alike[0] if many else None


class Compiled:
    """The replay of one generation's cycles, of those that can be. shapes: kinds that it has recorded."""

    def __init__(self, recorder: Recorder, choice: CompileChoice):
        self.recorder, self.choice, self.shapes = recorder, choice, 0
        self._spoilt = 0  # coming cycles whose time holds a recording, or a build for want of one

    def find(self, frame: Frame, rows: int, stats: Stats) -> Callable | None:
        """Find what does as `step` does with this frame behind `rows` rows; None where that is to be built.

        stats: counts what is recorded for that.
        """
        pickers, cache = [member.picker for member in frame.members if member], frame.cache
        first = pickers[0]
        pick = first.options, first.logprobs, first.draft_sampling
        foreign = any(p.sampler or p.processors or (p.options, p.logprobs, p.draft_sampling) != pick for p in pickers)
        if frame.plan.p_min or foreign or not self.choice.on or not all(c.parts for c in cache.stepped):
            return None
        kind = Kind.of(frame, rows, pick)
        most = Bounds(KEPT, HELD if isinstance(kind.form, PromptForm) else HELD_TOGETHER)
        known = self.shapes
        found = self.recall(frame.model, kind, recorded, most)
        stats.replays(0, self.shapes - known)
        keys = [(member.picker if member else first).key for member in frame.members]
        return found and partial(found, keys=keys, starts=cache.starts)

    def recall(self, model: Target, kind: Any, record: Callable, most: Bounds) -> Callable | None:
        """Find the step of a kind as `Recorder.find` does, or record it."""
        found, new = self.recorder.find(model, kind, record, most)
        self.shapes += new
        self._spoilt = 2 if new or not found else self._spoilt
        return found

    def observe(self, plan: Plan, rows: Any, replayed: bool, seconds: float | None) -> float | None:
        """Tell the replay trial a cycle's seconds and return them; None where a recording, or its want, is in them.

        rows: how many the cycle verified, or what else makes two cycles alike.
        """
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
