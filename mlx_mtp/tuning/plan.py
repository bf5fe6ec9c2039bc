"""Say what a cycle is to do, what is expected and what came of it; or decide the same for each."""

from dataclasses import dataclass
from typing import NamedTuple

SHORTEST = 3  # tokens that have to have occurred before for a lookup
STAY = 8  # cycles over which a catch-up of the heads is paid off


@dataclass(frozen=True)
class Plan:
    """The task of one cycle.

    source: who drafts, "lookup" in the text or the model's own drafter by its name. k: most drafts it verifies, 0 is
    a plain step. p_min: the drafter's confidence is read first and only the leading drafts that pass are verified.
    """

    source: str = "heads"
    k: int = 0
    p_min: bool = False

    def kind(self, matched: int) -> str:
        """Name the drafts that are counted together; of lookups those of matches about as long."""
        if self.source != "lookup":
            return "confident" if self.p_min else self.source
        return f"lookup {min(matched, 16).bit_length()}"


PLAIN = Plan()


class Choice(NamedTuple):
    """A plan, the tokens it should give, the plain steps it should take, and those of idle heads' reading before."""

    plan: Plan
    tokens: float
    steps: float
    rows: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / (self.steps + self.rows / STAY)

    def __str__(self) -> str:
        return f"costs {self.tokens / self.rate:.1f} plain steps, gains {self.tokens:.1f} tokens"

    @property
    def risk(self) -> float:
        """Plain steps that are lost if no draft is right."""
        return self.steps + self.rows - 1


@dataclass(frozen=True)
class Cycle:
    """The outcome of one cycle.

    verified: drafts verified, fewer than plan.k where p_min cut them, or near the end. accepted: how many were right.
    seconds: None if not measured. prefilled: rows that idle heads had to read before; its seconds hold that, too.
    matched: what `Controller.plan` was told. depths: of several texts, per depth the share whose draft was right, and
    of those whose draft would have counted; accepted is then their mean.
    """

    plan: Plan
    verified: int
    accepted: float
    seconds: float | None
    prefilled: int = 0
    matched: int = 0
    depths: tuple[tuple[float, float], ...] = ()


class Fixed:
    """The same plan for each cycle: k drafts of `source`, or max_lookup of the text where its end occurred before."""

    def __init__(self, k: int, *, max_lookup: int = 0, p_min: bool = False, source: str = "heads"):
        self.k, self.max_lookup, self.p_min, self.source = k, max_lookup, p_min, source

    def plan(self, matched: int = 0, pending: int = 0) -> Plan:
        if self.max_lookup and matched >= SHORTEST:
            return Plan("lookup", self.max_lookup)
        return Plan(self.source, self.k, self.p_min and self.k > 0)

    def observe(self, cycle: Cycle) -> None:
        pass


def ladder(most: int) -> list[int]:
    """List draft lengths worth trying, ascending, 1..most: each up to 8, 11, and `most`."""
    return [*(k for k in (1, 2, 3, 4, 5, 6, 7, 8, 11) if k < most), most] if most else []
