"""Define a cycle's plan, its estimated cost and its outcome, and a control with a fixed plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

SHORTEST = 3  # minimum length of a match for prompt lookup
TREES = 3, 7, 15  # numbers of drafts of trees
STAY = 8  # cycles over which the cost of resuming the drafter is spread


class Role(Enum):
    """What a drafter's drafts depend on. It determines how they are planned, limited and counted."""

    MODEL = "the hidden rows or tokens: acceptance is counted per depth"
    COPY = "an earlier copy of the last tokens: acceptance is counted by the length of the match"
    GRAMMAR = "the grammar: drafters of the model draft behind the tokens that it forces"


NAMES = {Role.MODEL: "heads", Role.COPY: "lookup", Role.GRAMMAR: "grammar"}  # of drafters in plans, by default


@dataclass(frozen=True)
class Plan:
    """What one cycle drafts.

    source: a name of the drafter (`Drafter.source` and `others`). k: maximum number of drafts, 0 for a plain step.
    p_min: whether the drafter's confidence is read, and only the leading confident drafts are verified. stepwise:
    with a grammar, the host reads each draft before the next one is made, and all are masked; otherwise only those
    that the grammar forces, and the first one after them. tree: the k drafts are a tree's, else a chain. stem: they
    are the best of the tree of the model's drafter and of one of copies; only with `tree`.
    """

    source: str = "heads"
    k: int = 0
    p_min: bool = False
    stepwise: bool = False
    tree: bool = False
    stem: bool = False

    @property
    def kind(self) -> str:
        """The name under which acceptance is counted; with copies it also depends on the length of the match."""
        if self.tree:
            return f"stem {self.source}" if self.stem else f"tree {self.source}"
        return f"confident {self.source}" if self.p_min else "stepwise" if self.stepwise else self.source


PLAIN = Plan()


class PlanEstimate(NamedTuple):
    """A plan with estimates: its tokens, its plain steps, and the plain steps of resuming the drafter (`rows`).

    spared: plain steps that are not among `steps` because all drafts may be accepted.
    """

    plan: Plan
    tokens: float
    steps: float
    rows: float = 0.0
    spared: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / (self.steps + self.rows / STAY)

    def __str__(self) -> str:
        return f"costs {self.tokens / self.rate:.1f} plain steps, gains {self.tokens:.1f} tokens"

    @property
    def risk(self) -> float:
        """Plain steps lost if no draft is accepted."""
        return self.steps + self.rows + self.spared - 1


class Node(NamedTuple):
    """A verified draft of a tree: its depth from 1 on, the drafter's probability of the path to it, and whether the
    whole path was right."""

    depth: int
    probability: float
    kept: bool


@dataclass(frozen=True)
class Cycle:
    """The outcome of one cycle.

    verified: number of drafts verified; fewer than plan.k if p_min cut them or the sequence ends. accepted: number
    of accepted drafts, in a batch the mean. seconds: None if not measured. prefilled: pending rows that the drafter
    read first, which `seconds` includes. matched: as passed to `Controller.plan`. depths: per depth the share of
    sequences whose draft was accepted, and that of those that could accept it, because their earlier drafts all were;
    () means those of one sequence with `accepted`. forced: the same of a drafter's first drafts that grammars force;
    `depths` begins behind these. context: positions before it, in a batch of the longest sequence. nodes: of a tree,
    for each sequence that may accept drafts its `verified` drafts in the order of rows; () for a chain.
    """

    plan: Plan
    verified: int
    accepted: float
    seconds: float | None
    prefilled: int = 0
    matched: int = 0
    depths: tuple[tuple[float, float], ...] = ()
    forced: tuple[tuple[float, float], ...] = ()
    context: int = 0
    nodes: Sequence[Sequence[Node]] = ()


class Accepted(NamedTuple):
    """Numbers of one sequence's drafts in a cycle.

    accepted: the accepted ones. most: those that it could accept at most. forced: first ones that a grammar forces.
    """

    accepted: int
    most: int
    forced: int = 0


def by_depth(sequences: Sequence[Accepted], verified: int) -> dict[str, tuple[tuple[float, float], ...]]:
    """Return a dict of the fields `depths` and `forced` of a Cycle, each with `verified` pairs.

    sequences: one or more. verified: number of drafts of each that were verified.
    """
    n, found = len(sequences), {}
    for name in ("depths", "forced"):
        shares = []
        for depth in range(verified):
            at = [(s, depth + s.forced if name == "depths" else depth) for s in sequences]
            at = [(s, i) for s, i in at if name == "depths" or i < s.forced]
            right, seen = sum(s.accepted > i for s, i in at), sum(min(s.accepted + 1, s.most) > i for s, i in at)
            shares.append((right / n, seen / n))
        found[name] = tuple(shares)
    return found


class Fixed:
    """A control that plans k drafts of the model's drafter in each cycle, and ignores outcomes.

    With max_lookup above 0 it plans max_lookup drafts of prompt lookup where SHORTEST or more tokens match. p_min:
    whether plans of the model's drafter read its confidence. names: the drafters' names in plans. nodes: if above 0,
    its drafts are a tree of that number instead.
    """

    def __init__(
        self,
        k: int,
        *,
        max_lookup: int = 0,
        p_min: bool = False,
        names: Mapping[Role, str] = MappingProxyType(NAMES),
        nodes: int = 0,
    ):
        self.k, self.max_lookup, self.p_min, self.names, self.nodes = k, max_lookup, p_min, names, nodes

    def plan(self, matched: int = 0, pending: int = 0) -> Plan:
        if self.max_lookup and matched >= SHORTEST:
            return Plan(self.names[Role.COPY], self.max_lookup)
        if self.nodes:
            return Plan(self.names[Role.MODEL], self.nodes, tree=True)
        return Plan(self.names[Role.MODEL], self.k, self.p_min and self.k > 0)

    def observe(self, cycle: Cycle) -> None:
        pass


def ladder(longest: int) -> list[int]:
    """Return the draft lengths to try, up to `longest`: 1, 2, 3, 5, 7, 11, and `longest` itself; [] for 0.

    They are few because each is measured, and recorded, by itself. The best of them has at least 0.97 of the rate of
    the best of all lengths.
    """
    return [*(k for k in (1, 2, 3, 5, 7, 11) if k < longest), longest] if longest else []


def tree_ladder(most: int) -> list[int]:
    """Return the numbers of drafts of trees to try, up to `most`: 3, 7, 15, or `most` itself; [] below 2.

    With the newest token they are 4, 8 and 16 rows. More sizes would make the kinds of recorded cycles, which are
    pairs of a run's rows and a plan, more than twice those of chains: (8 + 3) ** 2 of 8 ** 2.
    """
    return [*(k for k in TREES if k < most - 1), most] if most > 1 else []
