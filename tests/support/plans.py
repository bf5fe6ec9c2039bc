"""Control cycles by any plan of a test's choosing, and note their drafts."""

import importlib
import random

from mlx_mtp.tuning.plan import Plan


class Script:
    """Plans drawn at random, so that every one follows every other; stands in for a `Controller`."""

    paused = ""

    def __init__(self, seed: int, *, max_drafts: int, max_lookup: int = 15, p_min: bool = False):
        self.random, self.max_drafts, self.max_lookup = random.Random(seed), max_drafts, max_lookup
        self.p_min = p_min
        self.cycles: list = []

    def plan(self, matched: int = 0, behind: int = 0) -> Plan:
        kind = self.random.choice(["plain", "plain", "heads", "heads", "lookup"])
        if kind == "plain" or (kind == "heads" and not self.max_drafts):
            return Plan()
        if kind == "lookup":
            return Plan("lookup", self.random.randint(1, self.max_lookup))
        return Plan("heads", self.random.randint(1, self.max_drafts), self.p_min and self.random.random() < 0.5)

    def observe(self, cycle) -> None:
        self.cycles.append(cycle)


class Listed:
    """The plans of a list, again and again."""

    paused = ""

    def __init__(self, plans: list[Plan]):
        self.plans, self.cycles = plans, []
        self.planned = 0

    def plan(self, matched: int = 0, behind: int = 0) -> Plan:
        self.planned += 1
        return self.plans[(self.planned - 1) % len(self.plans)]

    def observe(self, cycle) -> None:
        self.cycles.append(cycle)


def follow(monkeypatch, control) -> None:
    """Let generations be controlled by `control`."""
    monkeypatch.setattr(importlib.import_module("mlx_mtp.generate"), "control_for", lambda *_, **__: control)
