"""Simulate a decode loop for any controller, from cost tables and acceptance traces, without a model.

Whether the draft at depth j for position t is right depends only on (trace, t, j), so all controllers get the same
drafts. As in the real loop, a cycle is planned before the previous one is observed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mlx_mtp.tuning.cost_file import from_json
from mlx_mtp.tuning.costs import Costs
from mlx_mtp.tuning.plan import Cycle, Fixed, Plan, ladder

DEEPEST = 15


def _table(known: dict[int, float]) -> list[float]:
    """Return T(1), T(2), ..., interpolated linearly between measured row counts."""
    rows = sorted(known)
    return [float(np.interp(r, rows, [known[x] for x in rows])) for r in range(1, rows[-1] + 1)]


# T(rows) over T(1) of whole forward passes, as reported by users of these machines; the last two: a Linux CPU.
TABLES = {
    "flat": _table({1: 1, 16: 1}),
    "M3 Ultra 27B": _table({1: 1, 7: 2.37, 8: 2.6, 16: 3.54}),
    "M5 Max 27B": _table({1: 1, 4: 1.28, 8: 2.46}),
    "M5 Max 27B, another": _table({1: 1, 2: 1.11, 3: 1.34, 4: 1.58}),
    "M5 Max 70B": _table({1: 1, 3: 1.11, 5: 1.42, 8: 2.2, 12: 3.86}),
    "M5 Max MoE": _table({1: 1, 2: 1.15, 3: 1.35, 4: 1.55, 5: 1.75, 7: 2.2}),
    "M4 Max 27B": _table({1: 1, 2: 1.31, 3: 1.68}),
    "M1 Max MoE": _table({1: 1, 2: 1.27, 4: 1.91, 9: 3.41}),
    "M3 Ultra GLM-5.2": [1, 2.2, 3.3],
    "Nemotron": _table({1: 1, 2: 1.593, 3: 1.847, 5: 2.44, 8: 3.321}),
    "Mac Studio, IQ4_XS": _table({1: 1, 2: 1.42, 3: 1.98, 4: 2.55}),
    "Mac Studio, Q4_K_S": _table({1: 1, 2: 1.62, 3: 2.32, 4: 3.11}),
    "reference BLAS": _table({1: 1, 2: 1.54, 3: 2.14, 4: 2.68, 6: 3.95, 8: 4.95}),
    "OpenBLAS": _table({1: 1, 2: 1.09, 3: 1.25, 4: 1.3, 6: 1.52, 8: 1.76}),
}
# Probability per depth that a draft is right if all earlier ones are; the last holds for all further depths.
HEADS = {
    "useless": [0.0],
    "perfect": [1.0],
    "typical": [0.76, 0.8, 0.82],
    "poor": [0.3],
    "half": [0.5],
    "good": [0.9],
    "decaying": [0.85, 0.7, 0.5, 0.3, 0.15],
}
DRIFTS: dict[str, Callable[[float, int], float]] = {
    "none": lambda at, rows: 1.0,
    "twice": lambda at, rows: 1 + at,
    "half": lambda at, rows: 1 - at / 2,
    "hot": lambda at, rows: 1.4 if at > 0.4 and rows > 1 else 1.0,
}
# Errors of known costs: factors of the plain step, of other cycles, and of their excess over the plain step.
WRONG = {"true": (1, 1, 1), "x2": (2, 2, 1), "/2": (0.5, 0.5, 1), "plain x2": (2, 1, 1), "plain /2": (0.5, 1, 1)}
WRONG |= {"ratio x2": (1, 1, 2), "ratio /2": (1, 1, 0.5)}


@dataclass
class Machine:
    """The costs of cycles on a machine, in plain steps.

    table: T(1), T(2), ...; extended with its last slope. depth: cost of one draft of the heads. row, resume: cost of
    resuming paused heads per pending row, and its constant part. read: cost of reading the heads' confidence.
    drift: (share of the run 0..1, rows) -> factor. slow_first: factor of the first cycle of a shape. prompt: pending
    rows at the start. begin: factor of the first cycle of a sequence. busy: whether other processes slow the machine
    down for a while, by up to 2, and the noise has heavy tails. contexts: positions at the start and the end of the
    run. row_context: cost of each further row of a verify per 1,024 positions, in plain steps at the start.
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
    pause: tuple[int, float] = (0, 0.0)  # index of a cycle with a pause, and the plain steps of the pause
    resume: float = 0.0
    prompt: int = 0
    begin: float = 1.0
    busy: bool = False
    contexts: tuple[int, int] = (0, 0)
    row_context: float = 0.0

    def context(self, at: float) -> int:
        """Return the number of positions at a share 0..1 of the run."""
        first, last = self.contexts
        return int(first + at * (last - first))

    def verify(self, rows: int) -> float:
        if rows <= len(self.table):
            return self.table[rows - 1]
        slope = self.table[-1] - self.table[-2]
        return self.table[-1] + slope * (rows - len(self.table))


@dataclass
class Text:
    """What a sequence determines about drafts.

    right: [positions, DEEPEST] bool, whether the heads' drafts are right. sure: the heads' confidence in them.
    matched: [positions] int, length of the match before a position. copied: [positions] bool, whether prompt lookup
    drafts the right token there.
    """

    right: np.ndarray
    sure: np.ndarray | None = None
    matched: np.ndarray | None = None
    copied: np.ndarray | None = None


@dataclass
class Outcome:
    """The result of a run. steps: its time in plain steps. ks: (source, k) -> number of cycles."""

    tokens: int = 0
    steps: float = 0.0
    ks: dict[tuple[str, int], int] = field(default_factory=dict)

    @property
    def rate(self) -> float:
        return self.tokens / self.steps


def trace(name: str, tokens: int) -> np.ndarray:
    """Return rates for `text`: of one of HEADS, of "a|b" with a change every 100 tokens, or of "bursts"."""
    n = tokens + DEEPEST + 2
    if name == "bursts":
        lengths = np.random.default_rng(5).integers(10, 40, n)
        first = np.repeat(np.arange(n) % 2 == 0, lengths)[:n]
        return np.where(first[:, None], 0.4, np.full((n, DEEPEST), 0.97))
    first, second = (_depths(HEADS[part]) for part in (name.split("|") * 2)[:2])
    return np.where((np.arange(n) // 100 % 2 == 0)[:, None], first, second)


def _depths(rates: list[float]) -> np.ndarray:
    return np.array([*rates, *[rates[-1]] * DEEPEST][:DEEPEST])


def known_costs(machine: Machine, longest: int, wrong: str) -> Costs:
    """Return costs from a file, with one of the errors of WRONG."""
    plain, others, beyond = WRONG[wrong]
    arms = [["heads", 0, plain * machine.second]]
    for k in ladder(longest):
        steps = others * (1 + beyond * (machine.verify(k + 1) + machine.depth * k - 1))
        arms.append(["heads", k, steps * machine.second])
    return from_json({"octaves": {"0": arms}, "catch_up": machine.row})


def measured(plans: dict[Plan, float], times: int = 30) -> Costs:
    """Return costs after `times` rounds in which a cycle of each plan took these seconds."""
    costs = Costs()
    for _ in range(times):
        for plan, seconds in plans.items():
            costs.observe(plan, seconds)
    return costs


@dataclass
class Comparison:
    """Tokens per second over plain decoding and over the best fixed k, of all seeds together and of the worst."""

    plain: float
    best: float
    worst_plain: float
    worst_best: float
    k: int


def compare(machine: Machine, rates: np.ndarray, make: Callable, longest: int, tokens: int, seeds) -> Comparison:
    """Run make() and every fixed k up to `longest` on the same sequences."""
    ours, fixed = [], [[] for _ in range(longest + 1)]
    for seed in seeds:
        words = text(rates, seed)
        ours.append(replay(machine, words, make(), tokens, seed).steps)
        for k in range(longest + 1):
            fixed[k].append(replay(machine, words, Fixed(k), tokens, seed).steps)
    mine, others = np.array(ours), np.array(fixed)
    k = int(others.sum(axis=1).argmin())
    plain, best = others[0] / mine, others[k] / mine
    total = others.sum(axis=1) / mine.sum()
    return Comparison(float(total[0]), float(total[k]), float(plain.min()), float(best.min()), k)


def text(rates: np.ndarray, seed: int) -> Text:
    """Return a random sequence. rates: [positions, DEEPEST], probability of a right draft after right ones."""
    return Text(np.random.default_rng(seed).random(rates.shape) < rates)


def replay(machine: Machine, text: Text, controller, tokens: int, seed: int, p_min: float = 0.7) -> Outcome:
    """Run a controller until `tokens` tokens are generated, and cut the last cycle to them.

    A drafting cycle always reads the rows of the newest run; resuming heads first read the pending rows before them.
    """
    rng = np.random.default_rng([seed, 7])
    noise = np.clip(rng.normal(1, machine.noise, tokens), 0.3, 3) if machine.noise else np.ones(tokens)
    missing = rng.random(tokens) < machine.missing
    slow = _slow(machine, tokens, rng)
    outcome, shapes, backlog, run, pos = Outcome(), set(), machine.prompt, 1, 0
    matched = _matched(text, 0)
    plan = controller.plan(matched, backlog)
    for i in range(tokens):
        verified, accepted = _verify(text, plan, pos, tokens, p_min)
        prefilled, backlog = (backlog, 0) if _drafts(plan) else (0, backlog + run)
        context = machine.context(pos / tokens)
        steps = _cost(machine, plan, verified, prefilled) + machine.row_context * verified * context / 1024
        steps *= noise[i] * machine.drift(pos / tokens, verified + 1)
        shape = (plan.source, plan.k, verified)
        steps *= 1 if shape in shapes else machine.slow_first
        steps += machine.pause[1] * (i == machine.pause[0])
        steps *= slow[int(outcome.steps) % len(slow)] * (1 if i else machine.begin)
        shapes.add(shape)
        outcome.steps += steps
        outcome.ks[plan.source, plan.k] = outcome.ks.get((plan.source, plan.k), 0) + 1
        seconds = None if missing[i] else steps * machine.second
        cycle = Cycle(plan, verified, accepted, seconds, prefilled, matched, context=context)
        matched = _matched(text, pos)  # the host has the tokens before this cycle
        following = controller.plan(matched, backlog)
        controller.observe(cycle)
        run, plan = accepted + 1, following
        pos += run
        if pos >= tokens:
            outcome.tokens = pos
            return outcome
    raise AssertionError("a cycle generates at least one token")


def _slow(machine: Machine, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Return the factor of cycles at each plain step: alternating normal and slow periods of 10 to 600 steps."""
    if not machine.busy:
        return np.ones(1)
    lengths = np.exp(rng.uniform(np.log(10), np.log(600), tokens)).astype(int)
    factors = np.where(np.arange(tokens) % 2 == rng.integers(2), 1.0, rng.uniform(1.3, 2.0, tokens))
    periods = np.repeat(factors, lengths)[: 4 * tokens]
    return periods * np.exp(np.clip(0.08 * rng.standard_t(2, len(periods)), -0.5, 1.5))


def _matched(text: Text, pos: int) -> int:
    return 0 if text.matched is None else int(text.matched[pos])


def _drafts(plan: Plan) -> bool:
    return plan.source == "heads" and plan.k > 0


def _cost(machine: Machine, plan: Plan, verified: int, prefilled: int) -> float:
    steps = machine.verify(verified + 1)
    if _drafts(plan):
        steps += machine.depth * plan.k + machine.row * prefilled + machine.resume * (prefilled > 0)
        steps += machine.read * plan.p_min
    return steps


def _verify(text: Text, plan: Plan, pos: int, tokens: int, p_min: float) -> tuple[int, int]:
    """Return the numbers of verified and of accepted drafts at a position."""
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
