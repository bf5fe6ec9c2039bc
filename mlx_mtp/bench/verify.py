"""Time a verify of M rows relative to a single row, for the whole model and for each of its parts.

The whole is the decoding loop's own pass (`step.verify`) at some context, on caches that roll back; parts are
separate chains (`timing.py`). Row counts take turns within a round, and ratios are within a round.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import mlx.core as mx
from rich.table import Table

from ..cache.ring import MAX_ROWS
from ..decoding.drafters.drafter import Frame
from ..decoding.members import Single
from ..decoding.run import NO_DRAFTS, NONE_ACCEPTED, Drafts, Run
from ..decoding.sampling import Picker
from ..decoding.step import verify
from ..kernels import on_metal
from ..layers.kernel_site import VERIFY_ROWS
from ..layers.with_heads import WithHeads
from ..tuning.kernel_sites import place
from ..tuning.kernel_switch import more_trials, switch, trials
from ..tuning.kernel_trials import decide, requested
from ..tuning.kernel_verdict import in_words
from ..tuning.lane_sites import MATRIX, enter_matrix
from ..tuning.plan import Plan
from .profile import prefilled
from .result import curve_title, new_table
from .subject import Subject, filler, make_prompts
from .timing import REPEATS, Timed, interleaved, measured, ratio, steps_for
from .verify_parts import expert_inputs, parts_of

STOCK, OURS = "stock", "ours"
Curve = dict[str, Any]
Turns = dict[tuple[str, int], Callable[[], float]]  # functions that return seconds, by side and rows


class Kernels:
    """The kernels that trials switch on for a model, and that are off inside `only(STOCK)`; none without a Metal GPU.

    The model must have been loaded without kernels; ValueError if it has no port. lane: which kernels to try, as
    `kernels` of `load`; with "off" there are none. rows: maximum number of rows that will be measured.
    """

    def __init__(self, model: Any, lane: str | None, rows: int = VERIFY_ROWS[-1]):
        self.sites: list[Any] = []
        self.words: tuple[str, ...] = ("none: as requested",) if on_metal() else ("none: no Metal GPU",)
        if not issubclass(type(model), WithHeads):
            raise ValueError(
                "the model has no port and is decoded one row at a time: there is no verify to measure; "
                "give a model of a supported family"
            )
        if on_metal() and requested(lane) != "off":
            dtype = model.no_hidden().dtype
            self.sites = place(model)
            if requested(lane) == MATRIX:
                enter_matrix(model, self.sites)
            more = more_trials(self.sites, dtype) if rows > VERIFY_ROWS[-1] else []
            verdicts = decide([*trials(self.sites, dtype), *more], lane=requested(lane))
            switch(self.sites, verdicts, dtype)
            self.words = in_words(verdicts)
        self.rows = [site.rows for site in self.sites]

    @property
    def sides(self) -> tuple[str, ...]:
        return (STOCK, OURS) if any(self.rows) else (STOCK,)

    @contextmanager
    def only(self, side: str) -> Iterator[None]:
        """Inside the block run mlx-lm's modules (side STOCK), or the kernels that are on (OURS)."""
        try:
            for site in self.sites if side == STOCK else ():
                site.rows = frozenset()
            yield
        finally:
            for site, rows in zip(self.sites, self.rows, strict=True):
                site.rows = rows


class VerifyPass:
    """The target's pass over M rows after a context, repeatable.

    text: tokens, of which the first `context` are prefilled; the rows follow. step: tokens per prefill chunk.
    A fully accepted verify of M rows precedes a timed pass, so that recurrent layers have a tape to replay, as in the
    loop.
    """

    def __init__(self, model: Any, text: Sequence[int], context: int, step: int):
        assert len(text) >= context + 2 * MAX_ROWS, "a text too short"
        self.text, self.context = mx.array(list(text)), context
        self.model, (self.cache, _) = model, prefilled(model, text[:context], 0, step, 2 * MAX_ROWS)
        self.recurrent = [c for c in self.cache.layers if c.is_state]
        self.states: dict[int, list[Any]] = {0: [c.parts for c in self.recurrent]}

    def graph(self, rows: int, start: int, states: int) -> Run:
        """Return a pass over `rows` rows from position `start` on, not computed.

        states: the row count whose stored states recurrent layers start from; 0: those after the prefill.
        """
        cache = self.cache
        at = mx.array([start]) if rows > 1 else start
        for c in cache.layers:
            c.seek(at, start)
        for c, parts in zip(self.recurrent, self.states[states], strict=True):
            c.parts = parts
        last = Run(self.model.no_hidden(), self.text[None, start : start + 1], NONE_ACCEPTED)
        frame = Frame(self.model, cache, Plan(), None, (Single(Picker()),), start)
        drafts = Drafts(self.text[None, start + 1 : start + rows]) if rows > 1 else NO_DRAFTS
        return verify(frame, last, drafts)

    def run(self, rows: int, start: int, states: int) -> float:
        """Return the seconds of evaluating the pass of `graph` with these arguments; building it is not timed."""
        found = self.graph(rows, start, states)
        mx.synchronize()
        tic = perf_counter()
        mx.eval(found.packed, self.cache.arrays)
        mx.synchronize()
        return perf_counter() - tic

    def __call__(self, rows: int) -> float:
        """Return the minimum seconds of a few passes over `rows` rows, because other work only adds time."""
        if rows not in self.states:
            self.run(rows, self.context, 0)
            self.states[rows] = [c.parts for c in self.recurrent]
        return min(self.run(rows, self.context + rows, rows) for _ in range(REPEATS))


@dataclass(frozen=True)
class CurvePlan:
    """Row counts, which must include 1, and contexts to time, in this number of rounds.

    Raises ValueError for a row count outside 1 to MAX_ROWS or a context below 1; other fields are not checked.

    cooldown: seconds of rest before each turn. seconds: of a part's chain.
    """

    rows: Sequence[int]
    contexts: Sequence[int]
    rounds: int
    cooldown: float = 0.0
    seconds: float = 0.005

    def __post_init__(self) -> None:
        assert 1 in self.rows, "ratios are over one row"
        if wrong := [rows for rows in self.rows if not 1 <= rows <= MAX_ROWS]:
            raise ValueError(f"rows={wrong[0]}: allowed is 1 to {MAX_ROWS}")
        if wrong := [context for context in self.contexts if context < 1]:
            raise ValueError(f"contexts={wrong[0]}: allowed is at least 1")


def text_of(subject: Subject, context: int) -> list[int]:
    """Return the tokens of a context and of the rows after it: source code, or random tokens without a tokenizer."""
    length = context + 2 * MAX_ROWS
    if subject.tokenizer is None:
        return make_prompts(None, subject.model.vocab_size, each=1, context=length)[0].tokens
    characters, tokens = 4 * length, list[int]()
    while len(tokens) < length:
        tokens, characters = subject.tokenizer.encode(filler(characters)), 2 * characters
    return tokens[:length]


def measure(model: Any, text: Sequence[int], kernels: Kernels, plan: CurvePlan, step: int) -> Iterator[Curve]:
    """Yield the times T(M) of the whole model at each context, then of each part, as curves.

    A curve has a name, context, and seconds by side and rows, a value per round, of one pass over all layers.
    text: as `text_of` returns it for the longest context. step: tokens per prefill chunk.
    """
    with expert_inputs(model) as inputs, kernels.only(STOCK):
        VerifyPass(model, text, plan.contexts[0], step).run(MAX_ROWS, plan.contexts[0], 0)
    mx.eval(list(inputs.values()))
    for context in plan.contexts:
        whole = VerifyPass(model, text, context, step)
        turns = {(side, m): partial(whole, m) for side in kernels.sides for m in plan.rows}
        yield {"name": "whole", "context": context, "seconds": _timed(turns, kernels, plan)}
        del whole, turns
    for part in parts_of(model, plan.contexts, inputs):
        turns = {}
        for side in kernels.sides:
            with kernels.only(side):
                for m in (m for m in plan.rows if m <= part.most):
                    calls = part.calls(m)
                    turns[side, m] = Timed(calls, steps_for(calls, plan.seconds))
        yield {"name": part.name, "context": part.context, "seconds": _timed(turns, kernels, plan)}


def _timed(turns: Turns, kernels: Kernels, plan: CurvePlan) -> dict[str, dict[int, list[float]]]:
    contenders = {turn: kernels.only(turn[0])(run) for turn, run in turns.items()}
    found: dict[str, dict[int, list[float]]] = {}
    for (side, m), seconds in interleaved(contenders, plan.rounds, cooldown=plan.cooldown).items():
        calls = len(run.calls) if isinstance(run := turns[side, m], Timed) else 1
        found.setdefault(side, {})[m] = [calls * s for s in seconds]
    return found


def curve_table(curves: Sequence[Curve], side: str, title: str) -> Table:
    """Return a table of T(M)/T(1) of one side, a line per M, a column per curve; its first line is T(1) in ms.

    curves: as read from JSON.
    """
    seconds = [curve["seconds"][side] for curve in curves]  # as in JSON, with rows as strings
    table = new_table(title, "M", *map(curve_title, curves), left=0)
    table.add_row("1, ms", *(f"{1e3 * measured(of['1']).median:.3f}" for of in seconds), end_section=True)
    for m in sorted({m for of in seconds for m in of} - {"1"}, key=int):
        ratios = [ratio(of[m], of["1"]) if m in of else None for of in seconds]
        table.add_row(m, *(f"{r.median:.2f}{'' if r.conclusive else '?'}" if r else "" for r in ratios))
    if any("?" in str(cell) for column in table.columns for cell in column.cells):
        table.caption = "?: inconclusive, its spread is above 5%"
    return table


def remarks(kernels: Kernels, weights: int) -> list[str]:
    """Return remarks on the tables of `bench verify`, a sentence each; weights: bytes of the target."""
    sentences = [
        f"A pass reads up to {weights / 1e6:.0f} MB of weights; those that fit into the chip's caches are not cold."
    ]
    if OURS not in kernels.sides:
        why = "this machine has no Metal GPU" if not on_metal() else "none is on"
        sentences.append(f"ours = stock modules: kernels need Metal, and {why}.")
    return sentences
