"""Check that rank 0 decides the plans of a generation, and that different tokens on a rank end it."""

import pytest

from mlx_mtp.decoding.agreement import Agreement
from mlx_mtp.decoding.history import TokenHistory
from mlx_mtp.tuning.plan import Cycle, Plan

SOURCES = "heads", "lookup"


class Control:
    """A control that returns the given plans and records observed cycles."""

    def __init__(self, *plans):
        self.plans, self.cycles = list(plans), []

    def plan(self, matched, pending):
        return self.plans.pop(0)

    def observe(self, cycle):
        self.cycles.append(cycle)


class Two:
    """Rank 0 or 1 of two. others: numbers of the other rank; None for the same as this one's."""

    size, stopping = 2, False

    def __init__(self, rank: int, others: list[int] | None = None):
        self.rank, self.others, self.sent = rank, others, []

    def gather(self, numbers):
        self.sent = numbers
        others = numbers if self.others is None else self.others
        return [numbers, others] if self.rank == 0 else [others, numbers]


def test_the_plans_and_the_end_are_rank_0s():
    plans = [Plan("lookup", 7), Plan("heads", 3, p_min=True), Plan("heads", 2, stepwise=True), Plan()]
    first = Two(0)
    lead = Agreement(first, Control(*plans), SOURCES)
    second = Two(1)
    control = Control()
    follower = Agreement(second, control, SOURCES)
    for i, plan in enumerate(plans):
        first.stopping = i == 3
        lead.meet(TokenHistory([1, 2, 3, i]), 0)
        second.others = first.sent
        follower.meet(TokenHistory([1, 2, 3, i]), 0)
        assert lead.plan() == follower.plan() == plan
        assert lead.stopping == follower.stopping == (i == 3)
    follower.observe(Cycle(Plan(), 0, 0, 0.1))
    lead.observe(Cycle(Plan(), 0, 0, 0.1))
    assert not control.cycles
    assert len(lead.control.cycles) == 1


@pytest.mark.parametrize("tokens", [[1, 2, 4], [1, 2]])
def test_other_tokens_end_all(tokens):
    first = Two(0)
    Agreement(first, Control(Plan()), SOURCES).meet(TokenHistory([1, 2, 3]), 0)
    with pytest.raises(
        RuntimeError,
        match=r"^ranks: the tokens of rank 1 differ from the 3 of rank 0; use the same model, mlx and mlx_mtp",
    ):
        Agreement(Two(1, first.sent), Control(), SOURCES).meet(TokenHistory(tokens), 0)
