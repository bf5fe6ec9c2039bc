"""Time drafted decoding phase by phase, with the device waited for at every boundary.

The cycles are the decoding loop's own, the two halves of `step.step` one after the other: MLX is lazy, so what a
phase computes is evaluated before its clock is read, and nothing of another phase is pending when it starts. The
loop itself overlaps them, and builds the next cycle while one runs; what that saves is the overhead stated.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import mlx.core as mx

from ..cache.prompt_cache import make_prompt_cache
from ..decoding import cycle
from ..decoding.cycle import Decoder, Flight, prepare
from ..decoding.policy import source_of
from ..decoding.sampling import Picker
from ..decoding.stats import Stats
from ..decoding.step import propose, verify
from ..generate import generate_step
from ..tuning.plan import Fixed, Plan
from .timing import interleaved

PHASES = ("prefill", "draft", "verify", "accept", "host")
HOST = ("build the draft", "build the verify", "commit")  # the parts of the last


@dataclass(frozen=True)
class Workload:
    """A greedy text of max_tokens, with k drafts of the heads in every cycle; ValueError for more than they make."""

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
    """Watches a generation: seconds by phase and, of "host", by its parts; `wall` is of a clock of its own."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys((*PHASES[:-1], *HOST), 0.0))
    tokens: list[int] = field(default_factory=list)
    cycles: int = 0
    wall: float = 0.0

    def evaluate(self, phase: str, caches: Sequence[Any], *arrays: Any) -> None:
        """Compute what a phase is made of, and has written to caches, and wait for it."""
        with self.during(phase):
            mx.eval(*arrays, *(c.parts for c in caches))

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Add what runs inside to a phase, or to a part of "host"."""
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
        """Seconds of the wall that are in no phase."""
        return self.wall - sum(self.seconds.values())


Watch = TypeVar("Watch", bound=Timer)


def decode_in_phases(work: Workload, watch: Watch) -> Watch:
    """Generate once, phase by phase; returns the watch, which got tokens, cycles and seconds."""
    tic, plan = time.perf_counter(), Plan(source_of(work.model), work.k) if work.k else Plan()
    with watch.during("prefill"):
        d, last = read_prompt(work.model, work.prompt, work.k, work.step, work.max_tokens)
        if work.k:
            drafter = d.drafters[plan.source]
            drafter.read(work.model, d.cache, d.text.tokens, last.base - d.behind, last.base, step=work.step)
        mx.eval(last.run.packed, d.cache.arrays)
        last.after.release()
        ((newest, accepted),) = last.run.read()
    while True:
        with watch.during("commit"):
            watch.tokens += newest[: work.max_tokens - len(watch.tokens)]
            d.text.extend(newest)
        if len(watch.tokens) == work.max_tokens:
            break
        last = _cycle(d, last, plan, accepted, watch)
        with watch.during("commit"):
            ((newest, accepted),) = last.run.read()
        watch.cycles += 1
    watch.wall = time.perf_counter() - tic
    return watch


def read_prompt(model: Any, prompt: Sequence[int], k: int, step: int, more: int) -> tuple[Decoder, Flight]:
    """Let the target, and heads that draft k, read a prompt in chunks of `step`; room for `more` tokens is kept."""
    cache = make_prompt_cache(model, num_draft_tokens=k)
    cache.reserve(len(prompt) + more)
    d = Decoder(model, cache, Picker(), Fixed(k), Stats(), step, k)
    return d, cycle.read_prompt(d, list(prompt))


def _cycle(d: Decoder, last: Flight, plan: Plan, accepted: int, watch: Timer) -> Flight:
    """The cycle after `last`, of which so many drafts were accepted; computed, but its tokens are not read."""
    cache, new = d.cache, Flight(plan, last.after)
    with watch.during("build the draft"):
        frame, _ = prepare(d, last, plan, None)
        drafts = propose(frame, last.run.given, cache.unload())
    if plan.k:
        watch.evaluate("draft", cache.heads, drafts.tokens, cache.kept)
    with watch.during("build the verify"):
        new.run = run = verify(frame, last.run, drafts)
    watch.evaluate("verify", cache.layers, run.hidden, run.tokens)
    watch.evaluate("accept", [], run.packed, cache.layers[0].offset)
    with watch.during("commit"):
        new.base = last.base + accepted + 1
        cache.advance(new.base)
    return new


def undisturbed(work: Workload) -> tuple[list[int], float]:
    """Generate the same text by the decoding loop itself; returns its tokens, and seconds."""
    options: dict[str, Any] = {"adaptive": False, "prompt_lookup": False, "compile_cycles": False}
    options |= {"max_tokens": work.max_tokens, "num_draft_tokens": work.k, "prefill_step_size": work.step}
    tic = time.perf_counter()
    tokens = [token for token, *_ in generate_step(work.prompt, work.model, **options)]
    return tokens, time.perf_counter() - tic


def profile(work: Workload, *, rounds: int, cooldown: float = 0.0) -> tuple[list[Timer], list[float]]:
    """Time `rounds` generations of the workload phase by phase, and in turn as many undisturbed ones, in seconds."""
    turns: list[Any] = [lambda: decode_in_phases(work, Timer()), lambda: undisturbed(work)]
    timers, plain = interleaved(dict(enumerate(turns)), rounds, cooldown=cooldown).values()
    assert all(t.tokens == tokens for t in timers for tokens, _ in plain), "the profiled text is another one"
    return timers, [seconds for _, seconds in plain]
