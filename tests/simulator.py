"""A decode loop without a model: cost tables and acceptance traces, replayed for any controller.

Whether the draft at depth j for position t is right is a function of (trace, t, j): all contenders see one text.
As in the loop, a cycle is planned before the one before it has been observed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mlx_mtp.controller import Cycle, Plan

DEEPEST = 15


@dataclass
class Machine:
    """What cycles cost, in plain steps.

    table: T(1), T(2), ..; beyond its end the last slope goes on. depth: what one draft of the heads costs.
    row: what idle heads' catching up costs per row. read: the extra read of the heads' confidence.
    drift: (share of the run 0..1, rows) -> factor. slow_first: factor of the first cycle of a shape.
    """

    table: Sequence[float]
    depth: float = 0.08
    row: float = 0.01
    read: float = 0.05
    noise: float = 0.0
    drift: Callable[[float, int], float] = lambda at, rows: 1.0
    slow_first: float = 1.0
    missing: float = 0.0  # share of cycles whose seconds are not measured
    second: float = 0.02  # seconds per plain step

    def verify(self, rows: int) -> float:
        if rows <= len(self.table):
            return self.table[rows - 1]
        slope = self.table[-1] - self.table[-2]
        return self.table[-1] + slope * (rows - len(self.table))


@dataclass
class Text:
    """right: [positions, DEEPEST] bool, the heads' drafts. sure: the heads' confidence in them.

    matched: [positions] int, how many tokens before a position occurred before; copied: bool, whether the token there
    is the one that followed then.
    """

    right: np.ndarray
    sure: np.ndarray | None = None
    matched: np.ndarray | None = None
    copied: np.ndarray | None = None


@dataclass
class Outcome:
    """steps: the run's time in plain steps of its beginning. ks: (source, k) -> cycles."""

    tokens: int = 0
    steps: float = 0.0
    ks: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.tokens / self.steps


def text(rates: np.ndarray, seed: int) -> Text:
    """rates: [positions, DEEPEST], the chance that a draft whose predecessors are right is right."""
    return Text(np.random.default_rng(seed).random(rates.shape) < rates)


def replay(machine: Machine, text: Text, controller, tokens: int, seed: int, p_min: float = 0.7) -> Outcome:
    """Run a controller until `tokens` tokens are out; the last cycle is cut to what is left.

    Rows of the newest run are fed to the heads anyway; idle heads have to catch up on those before.
    """
    rng = np.random.default_rng([seed, 7])
    noise = np.clip(rng.normal(1, machine.noise, tokens), 0.3, 3) if machine.noise else np.ones(tokens)
    missing = rng.random(tokens) < machine.missing
    outcome, shapes, backlog, run, pos = Outcome(), set(), 0, 1, 0
    matched = _matched(text, 0)
    plan = controller.plan(matched, 0)
    for i in range(tokens):
        verified, accepted = _verify(text, plan, pos, tokens, p_min)
        caught_up, backlog = (backlog, 0) if _drafts(plan) else (0, backlog + run)
        steps = _cost(machine, plan, verified, caught_up) * noise[i] * machine.drift(pos / tokens, verified + 1)
        shape = (plan.source, plan.k, verified)
        steps *= 1 if shape in shapes else machine.slow_first
        shapes.add(shape)
        outcome.steps += steps
        outcome.ks[plan.source, plan.k] = outcome.ks.get((plan.source, plan.k), 0) + 1
        seconds = None if missing[i] else steps * machine.second
        cycle = Cycle(plan, verified, accepted, seconds, caught_up, matched)
        matched = _matched(text, pos)  # the host knows what came before this cycle
        following = controller.plan(matched, backlog)
        controller.observe(cycle)
        run, plan = accepted + 1, following
        pos += run
        if pos >= tokens:
            outcome.tokens = pos
            return outcome
    raise AssertionError("a cycle gives at least one token")


def _matched(text: Text, pos: int) -> int:
    return 0 if text.matched is None else int(text.matched[pos])


def _drafts(plan: Plan) -> bool:
    return plan.source == "heads" and plan.k > 0


def _cost(machine: Machine, plan: Plan, verified: int, caught_up: int) -> float:
    steps = machine.verify(verified + 1)
    if _drafts(plan):
        steps += machine.depth * plan.k + machine.row * caught_up + machine.read * plan.p_min
    return steps


def _verify(text: Text, plan: Plan, pos: int, tokens: int, p_min: float) -> tuple[int, int]:
    """Drafts verified from position pos on, and accepted."""
    fitting = min(plan.k, tokens - pos - 1)
    if plan.source == "lookup":
        hits = [bool(text.copied[pos + 1 + j]) for j in range(fitting)]
    else:
        hits = [bool(text.right[pos + 1 + j, j]) for j in range(fitting)]
        if plan.p_min:
            sure = [bool(text.sure[pos + 1 + j, j] >= p_min) for j in range(fitting)]
            fitting = _leading(sure)
    return fitting, _leading(hits[:fitting])


def _leading(flags: list[bool]) -> int:
    for i, flag in enumerate(flags):
        if not flag:
            return i
    return len(flags)
