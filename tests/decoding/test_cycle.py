"""A cycle is built while the previous one runs, and the host waits for the device exactly once per cycle."""

import re
import time

import mlx.core as mx
import numpy as np
import pytest
from plans import Listed, follow
from sweep import sampled, sweep

import mlx_mtp
from mlx_mtp.decoding import clock, driver
from mlx_mtp.decoding import step as step_module
from mlx_mtp.decoding.run import Drafts, Run
from mlx_mtp.tuning.controller import Controller
from mlx_mtp.tuning.plan import Plan

PROMPT = [1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3]
HEADS, SURE, LOOKUP, PLAIN = Plan("heads", 3), Plan("heads", 3, p_min=True), Plan("lookup", 3), Plan()
WAYS = {
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[0].item(),
    "numpy": np.array,
    "memoryview": lambda x: bytes(memoryview(x)),
    "bool": lambda x: bool(x[0]),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "repr": repr,
    "eval": mx.eval,
    "synchronize": lambda x: mx.synchronize(),
    "save": lambda x: mx.save("/dev/null", x),
    "compare": lambda x: any(part == -1 for part in x),
}
SLOW = 0.05  # seconds of a step, at least


class Slowed:
    """A model with target passes of SLOW seconds on the device. spans: the host's calls and their seconds.

    Any wait for such a pass is long, so that it is found however the host waits.
    """

    def __init__(self, monkeypatch, model):
        self.monkeypatch, self.spans, self.depth = monkeypatch, [], 0
        self.load = mx.random.normal((1 << 15,))
        while self._seconds() < SLOW:
            self.load = mx.random.normal((2 * self.load.size,))
        real = type(model).hidden
        monkeypatch.setattr(type(model), "hidden", lambda *args: self.late(real(*args)))

    def late(self, rows: mx.array) -> mx.array:
        """Return the same rows, SLOW seconds later."""
        # One long operation: MLX makes a host that is many operations ahead of a CPU wait.
        return rows + 0 * mx.sort(self.load + 0 * rows.reshape(-1)[0])[0]

    def _seconds(self) -> float:
        mx.eval(self.load)
        tic = time.perf_counter()
        mx.eval(self.late(mx.zeros((1, 1))))
        return time.perf_counter() - tic

    def time(self, owner, name: str, label: str = "") -> None:
        """Record the seconds of each call without those of recorded calls that it makes."""
        real = getattr(owner, name)

        def call(*args, **kwargs):
            tic, before, self.inside = time.perf_counter(), self.inside, 0.0
            try:
                return real(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - tic
                self.spans.append((label or name, seconds - self.inside))
                self.inside = before + seconds

        self.inside = 0.0
        self.monkeypatch.setattr(owner, name, call)


class Sneaky(Listed):
    """A control that waits for the running cycle in one of WAYS."""

    way, run = staticmethod(len), None

    def plan(self, matched: int = 0, pending: int = 0) -> Plan:
        if self.run:
            self.way(self.run.packed)
        return super().plan(matched, pending)


LABELS = ((driver, "plan_and_build"), (driver, "submit"), (Run, "read"), (Drafts, "sure"))
READS = ("read", "sure")


def spans_of(monkeypatch, model, control, **options):
    """Return (label, seconds) of the host's calls in decoding, "next" for the rest of the loop, and the stats."""
    stats = mlx_mtp.Stats()
    with monkeypatch.context() as patch:
        slowed = Slowed(patch, model)
        follow(patch, control)
        for owner, name in LABELS:
            slowed.time(owner, name)
        options = {"max_tokens": 12, "num_draft_tokens": 3, "draft_p_min": 0.3, "prompt_lookup": True} | options
        generation = mlx_mtp.generate_step(PROMPT, model, stats=stats, **options)
        next(generation)  # the prompt
        del slowed.spans[:]
        while True:
            tic, slowed.inside = time.perf_counter(), 0.0
            done = next(generation, None) is None
            slowed.spans.append(("next", time.perf_counter() - tic - slowed.inside))
            if done:
                return slowed.spans, stats


def waits_elsewhere(monkeypatch, model, controls, **options) -> list[tuple[str, float]]:
    """Return the spans in which the host waited without reading, of the run with the fewest of several."""
    found = []
    for control in controls:
        spans, _ = spans_of(monkeypatch, model, control, **options)
        found.append([span for span in spans if span[0] not in READS and span[1] > SLOW / 2])
        if not found[-1]:
            break
    return min(found, key=len)


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models(2, vocab_size=5)[0]


CASES = {
    "heads": [HEADS],
    "plain": [PLAIN],
    "lookup": [LOOKUP],
    "confidence": [SURE],
    "mixed": [HEADS, PLAIN, LOOKUP, HEADS, SURE, PLAIN, PLAIN, PLAIN, LOOKUP, SURE],
}


THOROUGH = [pytest.param(case, marks=sweep) for case in ("plain", "lookup", "confidence")]


@pytest.mark.timing
@pytest.mark.parametrize("case", ["heads", "mixed", "controller", *THOROUGH])
def test_the_host_waits_for_a_cycle_and_nowhere_else(monkeypatch, model, case):
    def control():
        if case == "controller":
            return Controller(max_drafts=1, max_lookup=4, p_min=True)
        return Listed(CASES[case])

    # Heads that read without drafting are computed after the target: operations enough that MLX makes a CPU's host
    # wait (see `late`): each head that there is drafts.
    k = 1 if case == "controller" else 3
    assert not waits_elsewhere(monkeypatch, model, [control() for _ in range(5)], num_draft_tokens=k)


LIKE_OTHERS = ("bool", "int", "float", "save", "compare")


@pytest.mark.timing
@pytest.mark.parametrize("way", [pytest.param(w, marks=sweep) if w in LIKE_OTHERS else w for w in WAYS])
def test_no_way_of_waiting_is_missed(monkeypatch, model, way):
    sneaky, real = Sneaky([HEADS]), driver.plan_and_build

    def build(seating, last, *how):
        sneaky.run, sneaky.way = last.run, WAYS[way]
        return real(seating, last, *how)

    monkeypatch.setattr(driver, "plan_and_build", build)
    assert waits_elsewhere(monkeypatch, model, [sneaky], max_tokens=4)


class Calls:
    """Records the names of calls in order, without calls that a call of `waits` makes itself."""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.names, self.waiting = monkeypatch, [], False
        for name in ("tolist", "item", "__array__", "__bool__", "__index__", "__int__", "__float__", "__repr__"):
            self.note(mx.array, name, waits=True)
        for name in ("eval", "synchronize"):
            self.note(mx, name, waits=True)

    def note(self, owner, name: str, label: str = "", *, waits: bool = False) -> None:
        real, label = getattr(owner, name), label or name

        def call(*args, **kwargs):
            if self.waiting:
                return real(*args, **kwargs)
            self.waiting = waits
            self.names.append(label)
            try:
                result = real(*args, **kwargs)
            finally:
                self.waiting = False
            if not waits:
                self.names.append(f"/{label}")
            return result

        self.monkeypatch.setattr(owner, name, call)


def calls_of(monkeypatch, model, control, **options):
    """Return the calls of the prefill, the calls of the cycles, and the stats."""
    stats = mlx_mtp.Stats()
    with monkeypatch.context() as patch:
        if control:
            follow(patch, control)
        calls = Calls(patch)
        for name, label in (("plan_and_build", "begin"), ("submit", "submit")):
            calls.note(driver, name, label)
        options = {"max_tokens": 24, "num_draft_tokens": 3, "draft_p_min": 0.3, "prompt_lookup": True} | options
        generation = mlx_mtp.generate_step(PROMPT, model, stats=stats, **options)
        next(generation)
        prompt, calls.names[:] = list(calls.names), []
        list(generation)
    return prompt, calls.names, stats


@pytest.mark.parametrize("case", sampled(["mixed", "controller"], [*CASES, "controller"]))
def test_order_of_events(monkeypatch, model, case):
    """Build the next cycle, read this one, submit the next; with p_min, after the confidence is read."""
    control = None if case == "controller" else Listed(CASES[case])
    _, calls, stats = calls_of(monkeypatch, model, control)
    first, build, start = ["begin", "/begin"], ["begin", "/begin", "tolist"], ["submit", "/submit"]
    sure = ["submit", "tolist", "/submit"]
    assert calls[:2] == first
    rest, cycles, confidences = calls[2:], 0, 0
    while rest:
        assert rest[:2] == start or rest[:3] == sure, rest
        confidences += rest[:3] == sure
        rest = rest[3 if rest[:3] == sure else 2 :]
        assert rest[:3] == build, rest
        rest, cycles = rest[3:], cycles + 1
    assert cycles == stats.cycles
    assert stats.waits == cycles + confidences
    assert stats.built_late == {}
    assert (confidences > 0) is (case in ("confidence", "mixed")) or case == "controller"


@pytest.mark.parametrize("reason", ["logits processors", "quantizing the caches"])
def test_a_cycle_that_must_be_built_late_is_counted(monkeypatch, tiny_models, reason):
    model, _ = tiny_models(0, head_dim=32, vocab_size=5)
    options = {"kv_bits": 8, "kv_group_size": 32, "quantized_kv_start": 26}
    if reason == "logits processors":
        options = {"logits_processors": [lambda tokens, logits: logits]}
    _, calls, stats = calls_of(monkeypatch, model, Listed([HEADS, PLAIN, LOOKUP]), **options)
    assert stats.waits == stats.cycles == calls.count("tolist")
    assert stats.built_late == {reason: stats.built_late[reason]}
    if reason == "logits processors":
        assert stats.built_late[reason] == stats.cycles - 1
        assert calls == ["begin", "/begin", "submit", "/submit", "tolist"] * stats.cycles
    else:
        late = re.findall("tolist begin /begin submit /submit (?=begin|tolist)", " ".join(calls))
        assert 1 <= len(late) == stats.built_late[reason] < stats.cycles - 2


@pytest.mark.parametrize("step", [1, 4, 2048])
def test_waits_of_a_prompt(monkeypatch, model, step):
    """One wait per chunk and one for the first token; the heads' prefill adds none."""
    prompt, _, _ = calls_of(monkeypatch, model, Listed([HEADS]), prefill_step_size=step, max_tokens=2)
    assert prompt == ["eval"] * -(-len(PROMPT) // step) + ["tolist"]


@pytest.mark.parametrize(
    ("waited", "built", "following", "expected"),
    [
        (0.0, 2.0, 2.0, 10.0),  # all alike
        (0.0, 2.0, 5.0, 7.0),  # a plain step before a cycle that drafts
        (0.0, 5.0, 2.0, 13.0),
        (0.0, 0.0, 9.9, 2.5),  # what is left is never nothing
        (4.0, 2.0, 5.0, 10.0),  # the device was busy all the time
        (4.0, 5.0, 2.0, 10.0),
        (2.0, 5.0, 2.0, 11.0),  # more than the host had time for
    ],
)
def test_a_cycle_is_not_charged_with_building_another_kind(waited, built, following, expected):
    assert clock.steady_seconds(10.0, waited, built, following) == pytest.approx(expected)


@pytest.mark.timing
def test_the_control_observes_the_seconds_of_a_series_of_equal_cycles(monkeypatch, model):
    """The time of building the next cycle is subtracted from the cycle in which it was built."""
    real, slow = step_module.propose, 0.1

    def propose(frame, *args):
        if frame.plan.k:
            time.sleep(slow)
        return real(frame, *args)

    monkeypatch.setattr(step_module, "propose", propose)
    control = Listed([PLAIN, PLAIN, HEADS] * 8)
    follow(monkeypatch, control)
    list(mlx_mtp.generate_step(PROMPT, model, max_tokens=40, num_draft_tokens=3))
    plain, drafting = (
        [c.seconds for c in control.cycles if bool(c.plan.k) == drafts and c.seconds] for drafts in (0, 1)
    )
    assert len(plain) > 8
    assert max(plain[1:]) < slow / 2
    assert min(drafting) > slow
