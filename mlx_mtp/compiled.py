"""Cycles that are recorded once (`mx.compile`) and replayed: the host walks a list of primitives, and runs no Python.

A recorded cycle is a function of arrays: the run before, caches, the key of draws. All else that it depends on is its
`Kind`, and positions that the host bounds are bounded by `Kind.end`, so that one record serves every cycle until a
buffer's next STEP, in this generation and in others. What happens rarely stays outside: buffers grow, idle heads wake
up and read, the text is searched.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from .cache import SlidingKVCache, make_saved, round_up
from .compile_choice import CompileChoice
from .controller import Fixed, Plan
from .cycle import Decoder, Flight, verify
from .draft import Drafts, Run, draft
from .draft_choice import DraftChooser
from .prefill import NO_DRAFTS, NONE_ACCEPTED
from .prompt_cache import PromptCache
from .sampling import Picker, Sampling
from .stats import Stats

OFTEN = 3  # times that cycles of a kind were built when it is recorded: that takes as long as many of them
KEPT = 16  # recorded kinds, of which each holds its graph
COUNTED = 256  # kinds whose occurrences are counted


class Kind(NamedTuple):
    """What a recorded cycle depends on besides the values of its inputs.

    rows: of the run before. end: a bound of all positions. layers, heads: the caches' `config`s, no heads where they
    are idle. shapes: of all caches' arrays. pick: how tokens are chosen.
    """

    plan: Plan
    rows: int
    end: int
    layers: tuple
    heads: tuple
    shapes: tuple
    pick: tuple[Sampling, bool, str]


class Recorder:
    """The recorded cycles of one model, the one used last at the end; `verdict`: whether replaying is faster."""

    def __init__(self):
        self.cycles: dict[Kind, Callable] = {}
        self.seen: Counter[Kind] = Counter()
        self.state: list = []
        self.verdict: bool | None = None

    def __reduce__(self):
        return Recorder, ()  # copies of a model record their own

    def fit(self, model: Any) -> None:
        """Forget what was recorded of a model that has changed, or in another thread: MLX keeps records per thread."""
        state = [threading.get_ident(), str(mx.default_stream(mx.default_device())), *_state(model)]
        if len(state) != len(self.state) or any(a is not b and not _equal(a, b) for a, b in zip(state, self.state)):
            self.cycles.clear()
            self.state = state

    def find(self, model: Any, kind: Kind) -> tuple[Callable | None, bool]:
        """The cycle of a kind, recorded if it occurs often; and whether it is new."""
        step, new = self.cycles.pop(kind, None), False
        if step is None:
            if len(self.seen) > COUNTED:
                self.seen.clear()
            self.seen[kind] += 1
            if self.seen[kind] < OFTEN:
                return None, False
            step, new = mx.compile(partial(_cycle, weakref.ref(model), kind)), True
        self.cycles[kind] = step
        if len(self.cycles) > KEPT:
            del self.cycles[next(iter(self.cycles))]
        return step, new


class Compiled:
    """The replayed cycles of a generation; see `Decoder.compiled`."""

    def __init__(self, recorder: Recorder, choice: CompileChoice):
        self.recorder, self.choice = recorder, choice

    def found(self) -> bool:
        """Whether a trial of this generation has come to a verdict, which the recorder then has."""
        new = self.choice.tried and self.choice.verdict is not None
        if new:
            self.recorder.verdict = self.choice.verdict
        return new

    def run(self, d: Decoder, last: Flight, plan: Plan) -> Run | None:
        """As `propose` and `verify` for the cycle after `last`; None where it is not replayed."""
        live = plan.k > 0 and plan.source == "heads"
        caches = [*d.cache.layers, *(d.cache.heads if live else ())]
        if plan.p_min or not self.choice.on or not all(c.parts for c in caches):
            return None
        kind = _kind(d, last, plan, caches)
        step, new = self.recorder.find(d.model, kind)
        if step is None:
            return None
        d.stats.compiled_shapes += new
        return _replay(step, kind, d, last, caches)


def _kind(d: Decoder, last: Flight, plan: Plan, caches: list) -> Kind:
    """Also makes room in the caches, all at once: they have the same end from then on."""
    base, rows, n = last.base, last.run.tokens.size, len(d.cache.layers)
    end = round_up(base + _span(rows, plan.k))
    for c in caches:
        c.hold(end)
    layouts = tuple(_layout(c, base) for c in caches)
    shapes = tuple(part.shape for c in caches for part in c.parts)
    pick = d.picker.options, d.picker.logprobs, d.picker.draft_sampling
    return Kind(plan, rows, end, layouts[:n], layouts[n:], shapes, pick)


def _span(rows: int, k: int) -> int:
    """Positions that the heads or the target may write behind the base of a run of `rows` rows."""
    return rows + 2 * k + 1


def _layout(c: Any, base: int) -> tuple:
    """A cache's `config`; the start of a window that has left it behind by position `base` makes no difference."""
    config = c.config
    if isinstance(c, SlidingKVCache) and c.start <= base - c.window:
        config["start"] = 0
    return tuple(config.items())


def _replay(step: Callable, kind: Kind, d: Decoder, last: Flight, caches: list) -> Run:
    cache, run, plan = d.cache, last.run, kind.plan
    if kind.heads:
        cache.wake(last.base)
    else:
        cache.idle(last.base)
        cache.to_device()
    given = [run.hidden, run.tokens]
    if run.drafts.size:
        given.append(run.accepted)
    guesses = []
    if plan.source == "lookup":
        guesses.append(d.text.continued(last.base + 1, run.tokens, run.accepted + 1, plan.k))
    before = cache.layers[0].offset
    ends = [before, *([cache.heads[0].offset] if kind.heads else [])]
    kept = cache.kept if kind.heads else []
    made, after, parts, kept = step(given, guesses, ends, [c.parts for c in caches], kept, d.picker.key)
    for c, arrays in zip(caches, parts, strict=True):
        c.parts = tuple(arrays)
    limit = last.base + kind.rows
    for c in cache.layers:
        c.seek(after, limit + plan.k + 1)
    if kind.heads:
        cache.kept = list(kept)
        for c in cache.heads:
            c.seek(before, limit)
    return Run(**{"accepted": NONE_ACCEPTED, "drafts": NO_DRAFTS.tokens, "logprobs": None, **made})


def _cycle(model: Any, kind: Kind, given: list, guesses: list, ends: list, parts: list, kept: list, key: mx.array):
    """What is recorded. Caches of its own stand in for a conversation's, whose arrays come and go."""
    model, plan, rows = model(), kind.plan, kind.rows
    caches = make_saved([dict(config) for config in (*kind.layers, *kind.heads)])
    n = len(kind.layers)
    cache = PromptCache(model, caches[:n], caches[n:], None, list(kept))
    cache.live = bool(kind.heads)
    for c, arrays, offset in zip(caches, parts, [ends[0]] * n + [ends[-1]] * (len(caches) - n), strict=True):
        c.parts = tuple(arrays)
        c.seek(offset, 0)
    cache.bound(kind.end - _span(rows, plan.k), rows)
    hidden, tokens, accepted = [*given, NONE_ACCEPTED][:3]
    run = Run(hidden, tokens, accepted, tokens[1:], tokens, None)
    options, logprobs, draft_sampling = kind.pick
    picker = Picker(options, logprobs=logprobs, key=key, draft_sampling=draft_sampling)
    drafts = Drafts(guesses[0]) if guesses else NO_DRAFTS
    if kind.heads:
        drafts = draft(model, cache, run, plan.k, DraftChooser.of(picker))
    decoder = Decoder(model, cache, picker, Fixed(plan.k), Stats(), step=1, k=plan.k)
    new = vars(verify(decoder, run, drafts))
    unset = {"logprobs"} if new["logprobs"] is None else set()
    unset |= set() if plan.k else {"accepted", "drafts"}
    made = {name: array for name, array in new.items() if name not in unset}
    return made, cache.layers[0].offset, [c.parts for c in caches], cache.kept


def _state(model: Any) -> list:
    """What recorded cycles hold of a model: its parameters, its modules' kinds, and which kernels are on."""
    found = [array for _, array in tree_flatten(model.parameters())]
    for module in model.modules():
        found.append(type(module))
        for value in vars(module).values():
            for part in (value, *getattr(value, "quantized", ())):
                sets = vars(part).values() if hasattr(part, "__dict__") else (part,)
                found += [each for each in sets if isinstance(each, frozenset)]
    return found


def _equal(a: Any, b: Any) -> bool:
    return not isinstance(a, mx.array) and not isinstance(b, mx.array) and a == b
