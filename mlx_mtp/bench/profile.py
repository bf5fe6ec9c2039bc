"""Time drafted decoding phase by phase, waiting for the device at every boundary.

The cycles are those of the decoding loop, with the two halves of `step.step` one after the other. MLX is lazy, so
each phase's arrays are evaluated before the clock is read, and no other phase has pending work when it starts. The
loop itself overlaps phases and builds the next cycle while one runs; the reported overhead is what that saves.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx
from mlx_lm.generate import StopSequences

from ..cache.make_cache import make_prompt_cache
from ..cache.prompt_cache import PromptCache
from ..decoding.alone import Alone
from ..decoding.drafters import drafters_of, names_of
from ..decoding.drafters.drafter import Frame
from ..decoding.prefill import prefill
from ..decoding.run import Run
from ..decoding.sampling import Picker
from ..decoding.seating import DriverOptions
from ..decoding.sequence import Sequence as Decoded
from ..decoding.sequence import first_tokens
from ..decoding.stats import Stats
from ..decoding.step import propose, verify
from ..generate import generate_step
from ..tuning.plan import Plan, Role
from .timing import interleaved

PHASES = ("prefill", "draft", "verify", "accept", "host")
HOST = ("build the draft", "build the verify", "commit")  # the parts of "host"


@dataclass(frozen=True)
class Workload:
    """A greedy generation of max_tokens with k drafts of the drafter in every cycle; ValueError for a wrong k."""

    model: Any
    prompt: Sequence[int]
    max_tokens: int
    k: int
    step: int  # prompt tokens per chunk

    def __post_init__(self) -> None:
        most = self.model.max_draft_tokens
        if not 0 <= self.k <= most:
            raise ValueError(f"num_draft_tokens={self.k}: allowed is 0 to {most} with this model")


@dataclass
class Timer:
    """Times a generation: `seconds` by phase and by part of "host"; `wall`: of the whole, measured separately."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PHASES[:-1], *HOST), 0.0))
    tokens: list[int] = field(default_factory=list)
    cycles: int = 0
    wall: float = 0.0

    def evaluate(self, phase: str, caches: Sequence[Any], *arrays: Any) -> None:
        """Evaluate a phase's arrays and the caches it has written, and wait for them."""
        with self.during(phase):
            mx.eval(*arrays, *(c.parts for c in caches))

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a phase or to a part of "host"."""
        tic = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - tic

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of each phase."""
        return {name: self.seconds[name] for name in PHASES[:-1]} | {"host": sum(self.seconds[h] for h in HOST)}

    @property
    def unexplained(self) -> float:
        """Seconds of the wall time that belong to no phase."""
        return self.wall - sum(self.seconds.values())


TimerType = TypeVar("TimerType", bound=Timer)


def decode_in_phases(work: Workload, watch: TimerType) -> TimerType:
    """Generate once, phase by phase; return `watch`, filled with tokens, cycles and seconds."""
    tic, plan = time.perf_counter(), Plan(names_of(work.model)[Role.MODEL], work.k) if work.k else Plan()
    with watch.during("prefill"):
        seat, newest = _seated(work)
        run, base, accepted = seat.first.run, seat.first.base, 0
        if work.k:
            drafter, tokens = seat.drafters[plan.source], seat.sequence.history.tokens
            drafter.read(work.model, seat.cache, tokens, base - seat.pending_rows, base, step=work.step)
        mx.eval(seat.cache.arrays)
        seat.first.after.release()
    while True:
        with watch.during("commit"):
            watch.tokens += newest[: work.max_tokens - len(watch.tokens)]
            seat.sequence.history.extend(newest)
        if len(watch.tokens) == work.max_tokens:
            break
        run, base = _cycle(seat, run, base, plan, accepted, watch)
        with watch.during("commit"):
            ((newest, accepted, _),) = run.read()
        watch.cycles += 1
    watch.wall = time.perf_counter() - tic
    return watch


def prefilled(model: Any, prompt: Sequence[int], k: int, step: int, more: int) -> tuple[PromptCache, mx.array]:
    """Prefill a prompt in the target and, if k > 0, the heads; return the cache and the last chunk's hidden rows.

    The last rows may still be pending for the heads. step: prompt tokens per chunk. more: number of tokens for which
    the cache reserves memory after the prompt.
    """
    cache = make_prompt_cache(model, num_draft_tokens=k)
    cache.reserve(len(prompt) + more)
    cache.begin(len(prompt))
    return cache, prefill(model, cache, list(prompt), heads=k > 0, chunk=step)


def _seated(work: Workload) -> tuple[Alone, list[int]]:
    """Prefill the prompt of `work`; return its sequence's seating before the first cycle, and the first token."""
    cache, hidden = prefilled(work.model, work.prompt, work.k, work.step, work.max_tokens)
    sequence = Decoded(
        cache, Picker(), StopSequences().matcher(), work.max_tokens, work.k, 0, Stats(), longest=0, uid=0
    )
    run, first = first_tokens(work.model, sequence, hidden)
    cache.pop_row()
    sequence.base = cache.offset - 1
    how = DriverOptions(work.step, adaptive=False, compile_cycles=False)
    return Alone(work.model, sequence, run, drafters_of(work.model, 0), how), first


def _cycle(seat: Alone, run: Run, base: int, plan: Plan, accepted: int, watch: Timer) -> tuple[Run, int]:
    """Run the cycle after the rows of `run` from position `base` on, of which `accepted` drafts were accepted.

    Returns its own run, before its tokens are read, and position.
    """
    cache = seat.cache
    with watch.during("build the draft"):
        given, _, reader = seat.enter(plan, run, base)
        seat.place(plan, run, base, replayed=False)
        frame = Frame(seat.model, cache, plan, reader, [seat.sequence], base)
        drafts = propose(frame, given, cache.unload())
    if plan.k:
        watch.evaluate("draft", cache.heads, drafts.tokens, cache.kept)
    with watch.during("build the verify"):
        new = verify(frame, given, drafts)
    watch.evaluate("verify", cache.layers, new.hidden, new.tokens)
    watch.evaluate("accept", [], new.packed, cache.layers[0].offset)
    with watch.during("commit"):
        base += accepted + 1
        cache.advance(base)
    return new, base


def undisturbed(work: Workload) -> tuple[list[int], float]:
    """Generate the text of `work` with the decoding loop, prefill included; return its tokens and seconds."""
    options: dict[str, Any] = {"adaptive": False, "prompt_lookup": False, "compile_cycles": False}
    options |= {"max_tokens": work.max_tokens, "num_draft_tokens": work.k, "prefill_step_size": work.step}
    tic = time.perf_counter()
    tokens = [token for token, *_ in generate_step(work.prompt, work.model, **options)]
    return tokens, time.perf_counter() - tic


def profile(work: Workload, *, rounds: int, cooldown: float = 0.0) -> tuple[list[Timer], list[float]]:
    """Time `rounds` generations phase by phase and as many undisturbed ones, alternately.

    Returns a timer per round, and the seconds of each undisturbed generation. AssertionError if texts differ.
    """
    turns: list[Any] = [lambda: decode_in_phases(work, Timer()), lambda: undisturbed(work)]
    timers, plain = interleaved(dict(enumerate(turns)), rounds, cooldown=cooldown).values()
    assert all(t.tokens == tokens for t in timers for tokens, _ in plain), "the profiled text differs"
    return timers, [seconds for _, seconds in plain]
