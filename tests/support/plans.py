"""Controls that return plans which a test chooses, and record the cycles."""

import random

from mlx_mtp.decoding import alone
from mlx_mtp.tuning.plan import Plan


class Script:
    """Random plans, so that every plan follows every other; replaces a `Controller`."""

    paused = ""

    def __init__(self, seed: int, *, max_drafts: int, max_lookup: int = 15, p_min: bool = False):
        self.random, self.max_drafts, self.max_lookup = random.Random(seed), max_drafts, max_lookup
        self.p_min = p_min
        self.cycles: list = []

    def plan(self, matched: int = 0, pending: int = 0) -> Plan:
        kind = self.random.choice(["plain", "plain", "heads", "heads", "lookup"])
        if kind == "plain" or (kind == "heads" and not self.max_drafts):
            return Plan()
        if kind == "lookup":
            return Plan("lookup", self.random.randint(1, self.max_lookup))
        return Plan("heads", self.random.randint(1, self.max_drafts), self.p_min and self.random.random() < 0.5)

    def observe(self, cycle) -> None:
        self.cycles.append(cycle)


class Listed:
    """Repeats the plans of a list. pending: rows that the drafter had to read before each plan."""

    paused = ""

    def __init__(self, plans: list[Plan]):
        self.plans, self.cycles, self.pending = plans, [], []
        self.planned = 0

    def plan(self, matched: int = 0, pending: int = 0) -> Plan:
        self.planned += 1
        self.pending.append(pending)
        return self.plans[(self.planned - 1) % len(self.plans)]

    def observe(self, cycle) -> None:
        self.cycles.append(cycle)


def follow(monkeypatch, control) -> None:
    """Use `control` in all generations."""
    monkeypatch.setattr(alone, "control_for", lambda *_, **__: control)
