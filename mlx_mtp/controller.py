"""How many tokens each cycle drafts."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Plan:
    """What one cycle does.

    source: where its drafts come from; k: most of them that it verifies, 0 is a plain step.
    p_min:  the heads' confidence is read first, and only the leading drafts that pass are verified.
    """

    source: Literal["heads", "lookup"] = "heads"
    k: int = 0
    p_min: bool = False


class Cycle(NamedTuple):
    """What a cycle did."""

    plan: Plan
    verified: int
    accepted: int
    seconds: float | None
    caught_up: int = 0
    matched: int = 0


class Fixed:
    """Always the same number of drafts, and the text's own continuation wherever it has one."""

    def __init__(self, k: int, *, max_lookup: int = 0, p_min: bool = False):
        self.max_drafts, self.max_lookup = k, max_lookup
        self._heads = Plan("heads", k, p_min and k > 0)

    def plan(self, matched: int = 0, behind: int = 0) -> Plan:
        return Plan("lookup", self.max_lookup) if matched and self.max_lookup else self._heads

    def observe(self, cycle: Cycle) -> None:
        """Nothing to learn."""


class Controller(Fixed):
    """To come."""
