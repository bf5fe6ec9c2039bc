"""A control of a test's choosing: any plan in any cycle."""

import random

from mlx_mtp.controller import Plan


class Script:
    """Plans drawn at random, so that every one follows every other; stands in for a `Controller`."""

    def __init__(self, seed: int, *, max_drafts: int, max_lookup: int = 7, p_min: bool = False):
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
