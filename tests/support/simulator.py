"""Simulate a decode loop for any controller, from cost tables and acceptance traces, without a model.

Whether the draft at depth j for position t is right depends only on (trace, t, j), so all controllers get the same
drafts. As in the real loop, a cycle is planned before the previous one is observed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from mlx_mtp.tuning.cost_file import from_json
from mlx_mtp.tuning.costs import Costs
from mlx_mtp.tuning.plan import Cycle, Fixed, Node, Plan, ladder

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
# The same of chains and trees: both lanes on paper (docs/measurements.md), published times of stock MLX, and a CPU.
LANES = {
    "M3 Ultra 27B, matrix": _table({1: 1, 4: 1.38, 8: 1.41, 16: 2.24}),
    "M5 Max 27B, matrix": _table({1: 1, 4: 1.67, 8: 1.7, 16: 2.86}),
    "M3 Ultra 27B, exact": _table({1: 1, 4: 1.29, 8: 2.55, 16: 4.73}),
    "M5 Max 27B, exact": _table({1: 1, 4: 1.26, 8: 2.55, 16: 4.76}),
    "published 27B": _table({1: 1, 2: 1.07, 4: 1.5, 8: 2.64, 16: 3.42}),
    "CPU": _table({1: 1, 2: 1.3, 4: 1.7, 8: 2.7, 16: 5}),
    "flat": TABLES["flat"],
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
    drafts the right token there. chances: [positions, DEEPEST, choices], the probabilities that the drafter states
    for its choices at each depth, in descending order. choice: [positions, DEEPEST] int, which one is right behind
    right ones; the number of choices if none is. levels: maximum depth of trees.
    """

    right: np.ndarray
    sure: np.ndarray | None = None
    matched: np.ndarray | None = None
    copied: np.ndarray | None = None
    chances: np.ndarray | None = None
    choice: np.ndarray | None = None
    levels: int = DEEPEST


@dataclass
class Outcome:
    """The result of a run. steps: its time in plain steps. ks: (source, k) -> number of cycles, "tree" for trees."""

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
    """Tokens per second over plain decoding, over the best fixed chain and over the best fixed plan, of all seeds.

    worst_plain, worst_best: of the worst seed. k, tree: drafts of the best fixed plan, and whether they are a tree.
    """

    plain: float
    best: float
    worst_plain: float
    worst_best: float
    k: int
    chain: float
    tree: bool


def compare(
    machine: Machine,
    rates: np.ndarray,
    make: Callable,
    longest: int,
    tokens: int,
    seeds,
    trees: Sequence[int] = (),
    words: Callable[[np.ndarray, int], Text] | None = None,
) -> Comparison:
    """Run make() and every fixed k up to `longest`, and fixed trees, on the same sequences, made by `words`."""
    ours, fixed = [], [Fixed(k) for k in range(longest + 1)] + [Fixed(1, nodes=nodes) for nodes in trees]
    others = np.zeros((len(fixed), len(seeds)))
    for i, seed in enumerate(seeds):
        made = (words or text)(rates, seed)
        ours.append(replay(machine, made, make(), tokens, seed).steps)
        others[:, i] = [replay(machine, made, each, tokens, seed).steps for each in fixed]
    mine, sums = np.array(ours), others.sum(axis=1)
    best, total = int(sums.argmin()), sums / np.sum(ours)
    worst = [float((others[i] / mine).min()) for i in (0, best)]
    chain = float(total[: longest + 1].min())
    k, tree = (best, False) if best <= longest else (trees[best - longest - 1], True)
    return Comparison(float(total[0]), float(total[best]), *worst, k, chain, tree)


def text(rates: np.ndarray, seed: int) -> Text:
    """Return a random sequence. rates: [positions, DEEPEST], probability of a right draft after right ones."""
    return Text(np.random.default_rng(seed).random(rates.shape) < rates)


def lattice(
    rates: np.ndarray, seed: int, second: float = 0.5, stated: float = 1.0, spread: float = 1.5, levels: int = 6
) -> Text:
    """Return a random sequence with a drafter of four choices at each depth.

    rates: as in `text`, on average of all positions: at each one the first choice's probability is drawn, from 0 or 1
    with a spread near 0. second: share of the rest that the second choice has, and so on. stated: the drafter states
    these probabilities to this power, normalized: above 1 it is too sure of itself. levels: of a tree.
    """
    draws = np.random.default_rng(seed)
    mean = np.clip(rates, 1e-3, 1 - 1e-3)
    each = [draws.beta(spread * mean, spread * (1 - mean))]
    rest = 1 - each[0]
    for _ in range(3):
        each.append(np.minimum(second * rest, each[-1]))
        rest = rest - each[-1]
    chances = np.stack(each, axis=-1)
    choice = (draws.random((*rates.shape, 1)) >= np.cumsum(chances, axis=-1)).sum(axis=-1)
    shown = chances**stated
    shown /= np.sum(shown, axis=-1, keepdims=True) + np.maximum(rest, 0)[..., None] ** stated
    return Text(choice == 0, chances=shown, choice=choice, levels=levels)


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
        verified, accepted, nodes = _verify(text, plan, pos, tokens, p_min)
        prefilled, backlog = (backlog, 0) if _drafts(plan) else (0, backlog + run)
        context = machine.context(pos / tokens)
        depth = max((node.depth for node in nodes), default=plan.k)
        steps = _cost(machine, plan, verified, prefilled, depth) + machine.row_context * verified * context / 1024
        steps *= noise[i] * machine.drift(pos / tokens, verified + 1)
        shape = (plan.kind, plan.k, verified)
        steps *= 1 if shape in shapes else machine.slow_first
        steps += machine.pause[1] * (i == machine.pause[0])
        steps *= slow[int(outcome.steps) % len(slow)] * (1 if i else machine.begin)
        shapes.add(shape)
        outcome.steps += steps
        kind = "tree" if plan.tree else plan.source
        outcome.ks[kind, plan.k] = outcome.ks.get((kind, plan.k), 0) + 1
        seconds = None if missing[i] else steps * machine.second
        trees = {"nodes": [nodes]} if plan.tree else {}
        cycle = Cycle(plan, verified, accepted, seconds, prefilled, matched, context=context, **trees)
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


def _cost(machine: Machine, plan: Plan, verified: int, prefilled: int, depth: int) -> float:
    """Return a cycle's plain steps; depth: of its drafts, each of which is a pass of the drafter."""
    steps = machine.verify(verified + 1)
    if _drafts(plan):
        steps += machine.depth * depth + machine.row * prefilled + machine.resume * (prefilled > 0)
        steps += machine.read * plan.p_min
    return steps


def _verify(text: Text, plan: Plan, pos: int, tokens: int, p_min: float) -> tuple[int, int, list[Node]]:
    """Return the numbers of verified and of accepted drafts at a position, and the nodes of a tree."""
    fitting = min(plan.k, tokens - pos - 1)
    if plan.tree:
        nodes = _tree(text, pos + 1, plan.k)
        accepted = max((node.depth for node in nodes if node.kept), default=0)
        return plan.k, min(accepted, tokens - pos - 1), nodes
    if plan.source == "lookup":
        hits = [bool(text.copied[pos + 1 + j]) for j in range(fitting)]
    else:
        hits = [bool(text.right[pos + 1 + j, j]) for j in range(fitting)]
        if plan.p_min:
            sure = [bool(text.sure[pos + 1 + j, j] >= p_min) for j in range(fitting)]
            fitting = _leading(sure)
    return fitting, _leading(hits[:fitting]), []


def _tree(text: Text, pos: int, k: int) -> list[Node]:
    """Return the k most probable paths of choices after a position, as the drafter states their probabilities.

    Choices at a depth have the same probabilities behind any path.
    """
    queue: list[tuple[float, int, int, bool]] = [(0.0, 0, 0, True)]  # -log probability, order, depth, right so far
    found, order = [], 0
    while len(found) < k and queue:
        cost, _, depth, right = heappop(queue)
        if depth:
            found.append(Node(depth, math.exp(-cost), right))
        if depth < text.levels:
            at = pos + depth, depth
            for i, chance in enumerate(text.chances[at]):
                order += 1
                heappush(
                    queue, (cost - math.log(max(chance, 1e-9)), order, depth + 1, right and text.choice[at] == i)
                )
    return found


def _leading(flags: list[bool]) -> int:
    for i, flag in enumerate(flags):
        if not flag:
            return i
    return len(flags)
