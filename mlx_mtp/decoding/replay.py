"""Record a step once (`mx.compile`) and replay it: the host then submits a list of primitives and runs no Python.

A recorded step depends on its `StepKey`; everything else is its input. Few keys must serve an answer whose cycles
have many draft lengths, one after another in any order (`recordable`): host-side positions are rounded up, in any
conversation and with any sequences of a pool; a step without a drafter reads only the newest row of the previous run,
and a step with a drafter that has `row_counts` reads one of these numbers of rows. Not recorded: growing buffers,
prefilling a paused drafter, and drafters that are not `in_step`.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache.prompt_cache import PromptForm
from ..cache.step_cache import CacheArrays, CacheForm
from ..cache.tree import RowTree
from ..kernels import source_bytes
from ..layers.blocks import lazily
from ..layers.target import Target
from ..tuning.plan import Plan
from ..tuning.replay_choice import CompileChoice
from .accept import Passed
from .drafters import drafter_of
from .drafters.drafter import Frame
from .masks import Masks
from .members import Single
from .recordable import recordable
from .run import Drafts, Run
from .sampling import Picker, Sampling, keys_of
from .stats import Stats
from .step import choose, forward, step

OFTEN = 2  # occurrences of a kind of step before it is recorded
KEPT = 32  # maximum recorded kinds per thread, of one sequence and of pools each
HELD = 80 * 2**20  # maximum bytes of kernel sources in all records: one of Step-3.5 holds 13 MB on a GPU
HELD_TOGETHER = 3 * HELD  # the same for pools, whose kinds multiply as sequences join and leave
THREADS = 4  # maximum threads with records: a function that MLX compiles in one thread cannot be called in another
COUNTED = 256  # maximum kinds whose occurrences are counted


Pick = tuple[Sampling, bool, str]  # sampling options, whether logprobs are returned, draft sampling


class ChoiceKind(NamedTuple):
    """The key of a recorded choice of tokens under masks: all that it depends on besides the values of its inputs.

    shape: of the hidden rows. pick: the same for all sequences. drafts, limits: whether there are any. levels: of the
    rows' tree, 0 for a chain. adapter: the name of the selected one. form: None: no caches are read.
    """

    shape: tuple[int, ...]
    pick: Pick
    drafts: bool
    limits: bool
    levels: int
    adapter: str | None
    form: None = None


class StepKey(NamedTuple):
    """The key of a recorded step: all that it depends on besides the values of its inputs.

    plan: with the name of the drafter only if the step makes the drafts. drafts: whether the step has a drafter.
    rows: of the previous run. end: upper bound of all positions after the step. adapter: name of the selected one.
    form, shapes: of the caches and their arrays. pick: the same for all sequences. masked: whether any sequence has
    a grammar; the record then ends with the hidden rows (`forward`), and the choice is recorded as a ChoiceKind.
    """

    plan: Plan
    drafts: bool
    rows: int
    end: int
    form: CacheForm
    shapes: tuple
    pick: Pick
    masked: bool = False
    adapter: str | None = None

    @classmethod
    def of(cls, frame: Frame, rows: int, pick: Pick) -> "StepKey":
        """Return the key of the recorded step for a frame that `recordable` returned and a run of `rows` rows.

        pick: how all sequences of the frame choose tokens.
        """
        end = frame.base + rows + frame.plan.k + 1
        cache = frame.cache
        shapes = tuple(part.shape for c in cache.stepped for part in (*c.parts, *c.fresh))
        plan = frame.plan if frame.asked else Plan("", frame.plan.k, tree=frame.plan.tree)  # the drafts are an input
        form, masked, adapter = cache.form(), _masked(frame), _adapter(frame)
        return cls(plan, frame.drafter is not None, rows, end, form, shapes, pick, masked, adapter)


def recorded(
    model_ref: "weakref.ref[Target]",
    kind: StepKey,
    run: Run,
    arrays: CacheArrays,
    drafts: Drafts,
    limits: mx.array | None = None,
    *,
    keys: mx.array,
    starts: Any,
    allowed: mx.array | None,
) -> tuple[Any, CacheArrays]:
    """Run the step with the key `kind` on caches made of the input arrays; `mx.compile` records this function."""
    model = model_ref()
    assert model is not None
    cache = kind.form.made(model)
    cache.starts = starts
    base = kind.end - kind.rows - kind.plan.k - 1
    drafter = drafter_of(model) if kind.drafts else None
    frame = Frame(model, cache, kind.plan, drafter, _members(kind.pick, keys), base, allowed)
    if kind.masked:
        return forward(frame, Run(*run), CacheArrays(*arrays), Drafts(*drafts))
    return step(frame, Run(*run), CacheArrays(*arrays), Drafts(*drafts), limits)


def recorded_choice(
    model_ref: "weakref.ref[Target]",
    kind: ChoiceKind,
    passed: Passed,
    limits: mx.array | None,
    masks: Masks,
    *,
    keys: mx.array,
) -> Run:
    """Choose tokens, as the key `kind` describes; `mx.compile` records this function."""
    model = model_ref()
    assert model is not None
    passed = Passed(*passed)
    tree = None if passed.tree is None else RowTree(*passed.tree)
    return choose(model, _members(kind.pick, keys), passed._replace(tree=tree), limits, masks)


def _members(pick: Pick, keys: mx.array) -> list[Single]:
    options, logprobs, draft_sampling = pick
    made = partial(Picker, options, logprobs=logprobs, draft_sampling=draft_sampling, step_keys=keys)
    return [Single(made(key=keys[i])) for i in range(len(keys))]


class Record(NamedTuple):
    """A step that `mx.compile` records at its first call. held: [bytes of kernel sources that it then holds]."""

    step: Callable
    held: list[int]

    @classmethod
    def of(cls, step: Callable) -> "Record":
        held = [0]
        return cls(mx.compile(partial(_measured, step, held)), held)


def _measured(step: Callable, held: list[int], *args: Any, **more: Any) -> Any:
    """Run a step while MLX records it, and store the bytes of its kernels' sources in `held`."""
    before = source_bytes()
    with lazily():
        found = step(*args, **more)
    held[:] = [source_bytes() - before]
    return found


class Recorder:
    """The recorded steps of one model by (thread, kind), the least recently used first.

    verdict: whether replaying is faster than building; None before a trial. Records hold the model's parameters, each
    with one adapter selected: `fit` drops those of a changed model.
    """

    def __init__(self):
        self.cycles: dict[tuple[threading.Thread, Any], Record] = {}
        self.seen: Counter[tuple[threading.Thread, Any]] = Counter()
        self.verdict: bool | None = None
        self._states: dict[str | None, list] = {}

    def __reduce__(self):
        return Recorder, ()  # a copy of the model records its own

    def drop(self) -> None:
        """Drop all records, which hold the launches of a graph that failed."""
        self.cycles.clear()

    def fit(self, model: Target) -> None:
        """Drop the records with the selected adapter if the model has changed since they were made.

        A change of its kernels, its drafter or the device counts, too.
        """
        state = [str(mx.default_device()), getattr(model, "drafter", None), *_state(model)]
        known = self._states.get(adapter := model.runtime.adapters.selected, [])
        if len(state) != len(known) or not all(map(_same, state, known)):
            self.cycles = {key: record for key, record in self.cycles.items() if key[1].adapter != adapter}
            self._states[adapter] = state

    def find(self, model: Target, kind: StepKey, record: Callable, held: int) -> tuple[Callable | None, bool]:
        """Return (the recorded step with a key, whether it is new), or (None, False) before its OFTEN-th occurrence.

        Records and occurrences are those of the calling thread.

        kind: the key. record: the function to record, which gets a weak reference to the model, the kind and the
        step's arrays.
        held: maximum bytes of kernel sources in all records with this form of caches; least recently used ones are
        dropped.
        """
        thread = threading.current_thread()  # not its number, which a later thread can have
        found = self.cycles.pop(key := (thread, kind), None)
        if found is not None:
            self.cycles[key] = found
            return found.step, False
        if len(self.seen) > COUNTED:
            self.seen.clear()
        self.seen[key] += 1
        if self.seen[key] < OFTEN:
            return None, False
        self.cycles[key] = found = Record.of(partial(record, weakref.ref(model), kind))
        while oldest := self._excess(key, held):
            self.seen[oldest] = 0
            del self.cycles[oldest]
        return found.step, True

    def _excess(self, new: tuple[threading.Thread, Any], held: int) -> tuple[threading.Thread, Any] | None:
        """Return the key of the least recently used record with caches like the new one's; None if none is too many.

        It is a record of the new one's thread if that has more than KEPT such records, else of any thread.
        """
        alike = [key for key in self.cycles if type(key[1].form) is type(new[1].form)]
        here = [key for key in alike if key[0] == new[0]]
        if len(here) > KEPT:
            return here[0]
        sizes = [self.cycles[key].held[0] for key in alike]  # the new one's is 0: assume the largest
        many = len(alike) > THREADS * KEPT or (len(alike) > 1 and sum(sizes) + max(sizes) > held)
        return alike[0] if many else None


class Compiled:
    """The replay of one generation's cycles: finds recorded steps, and measures whether they are faster."""

    def __init__(self, recorder: Recorder, choice: CompileChoice):
        self.recorder, self.choice = recorder, choice
        self._untimed = 0  # next cycles whose seconds include a recording, or a build because of a missing record

    def find(self, frame: Frame, run: Run, stats: Stats) -> tuple[Frame, Run, Callable | None]:
        """Return a step's frame, its input, and its record or None; frame and input are `recordable` without p_min.

        The record is a function of run, arrays, drafts and limits, or with a grammar of run, arrays and drafts, as
        `forward`. It is None with p_min, a caller's sampler or processors, options that differ between sequences, or
        caches without arrays; while the replay trial builds, or once building is found faster; and until the kind has
        occurred OFTEN times in this thread. Without p_min the caches are grown as `recordable` does, in any case.
        """
        pick, cache = _pick(frame), frame.cache
        if frame.plan.p_min:
            return frame, run, None
        frame, run = recordable(frame, run)
        if pick is None or not self.choice.on or not all(c.parts for c in cache.stepped):
            return frame, run, None
        kind = StepKey.of(frame, run.size, pick)
        held = HELD if isinstance(kind.form, PromptForm) else HELD_TOGETHER
        found = self.recall(frame.model, kind, recorded, held, stats)
        return frame, run, found and partial(found, keys=_keys(frame), starts=cache.starts, allowed=frame.allowed)

    def choose(self, frame: Frame, passed: Passed, limits: mx.array | None, masks: Masks, stats: Stats) -> Run:
        """Return what `step.choose` returns, by a recorded graph if there is one for this frame, also with p_min."""
        pick, found = _pick(frame), None
        if pick is not None and self.choice.on:
            levels = passed.tree.levels if passed.tree else 0
            given = passed.drafts is not None, limits is not None, levels
            kind = ChoiceKind(tuple(passed.hidden.shape), pick, *given, _adapter(frame))
            found = self.recall(frame.model, kind, recorded_choice, HELD, stats)
        if found is None:
            return choose(frame.model, frame.members, passed, limits, masks)
        position = mx.array(passed.position).reshape(-1)
        return found(passed._replace(position=position, each=()), limits, masks, keys=_keys(frame))

    def recall(self, model: Target, kind: Any, record: Callable, held: int, stats: Stats) -> Callable | None:
        """Return the recorded step with the key `kind`; None until the key has occurred OFTEN times in this thread.

        kind: a Kind or a ChoiceKind. stats: counts a new record. record, held: as in `Recorder.find`.
        """
        found, new = self.recorder.find(model, kind, record, held)
        stats.count_replays(0, int(new))
        self._untimed = 2 if new or not found else self._untimed
        return found

    def observe(self, plan: Plan, rows: Any, replayed: bool, seconds: float | None) -> float | None:
        """Report a cycle's seconds to the replay trial and return them.

        None, unreported, for cycles that may include a recording, or a build for lack of a record.
        rows: the number of verified rows, or another key: only cycles with equal plans and keys are compared.
        """
        if self._untimed:
            self._untimed -= 1
            return None
        self.choice.observe((plan, rows), replayed, seconds)
        return seconds

    def decided(self) -> bool:
        """Return whether this generation's replay trial has ended; if so, store its verdict in the recorder.

        If building each cycle's graph is faster than replaying recorded cycles, all records are dropped.
        """
        if not self.choice.tried or self.choice.verdict is None:
            return False
        self.recorder.verdict = self.choice.verdict
        if not self.recorder.verdict:
            self.recorder.cycles.clear()
        return True


def _pick(frame: Frame) -> Pick | None:
    """Return how all sequences of a frame choose; None if they differ or run a caller's code."""
    pickers = [member.picker for member in frame.members if member]
    picks = {(p.options, p.logprobs, p.draft_sampling) for p in pickers}
    foreign = len(picks) > 1 or any(p.sampler or p.processors for p in pickers)
    return None if foreign else picks.pop()


def _adapter(frame: Frame) -> str | None:
    return frame.model.runtime.adapters.selected


def _masked(frame: Frame) -> bool:
    return any(member is not None and member.picker.matcher is not None for member in frame.members)


def _keys(frame: Frame) -> mx.array:
    """Return the random key of each row, uint32 [n, 2]; a free slot has another row's."""
    first = next(member for member in frame.members if member)
    return keys_of([(member or first).picker for member in frame.members])


def _state(model: Target) -> list:
    """Return what recorded steps depend on in a model: its parameters, module types, and kernels that are on."""
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
