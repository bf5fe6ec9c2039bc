"""Rank 0 decides the plans and the end of a generation, and different tokens on a rank end it."""

import mlx.core as mx
import pytest

import mlx_mtp
from mlx_mtp.decoding.agreement import Agreement
from mlx_mtp.decoding.history import TokenHistory
from mlx_mtp.ranks.group import Ranks
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


SAME = {"num_draft_tokens": 3, "logits_processors": [lambda tokens, logits: logits]}


@pytest.mark.parametrize(
    ("options", "at", "cycles"),
    [
        ({"num_draft_tokens": 0}, 0, 0),
        ({"num_draft_tokens": 0}, 1, 1),
        ({"num_draft_tokens": 0}, 6, 2),
        ({"num_draft_tokens": 3, "draft_p_min": 0.3}, 6, 2),
        (SAME, 6, 1),
    ],
    ids=["prompt", "first token", "plain", "confidence", "built late"],
)
def test_a_stop_ends_a_generation(tiny_models, monkeypatch, options, at, cycles):
    """Once the tokens of the cycle that all ranks submitted last were yielded; the cache continues from there."""
    model, prompt, n = tiny_models(0)[0], [1, 2, 3, 0, 1, 2, 3, 0, 1], 24
    text = [token for token, *_ in mlx_mtp.generate_step(prompt, model, max_tokens=n, num_draft_tokens=0)]
    monkeypatch.setattr(model.runtime, "ranks", ranks := Ranks(mx.distributed.init()))
    cache, stats, shown = mlx_mtp.make_prompt_cache(model), mlx_mtp.Stats(), []
    how = {**options, "adaptive": False, "prompt_cache": cache, "stats": stats}
    ranks.stopping, before = not at, 0
    for token, *_ in mlx_mtp.generate_step(prompt, model, max_tokens=n, **how):
        shown.append(token)
        if len(shown) == at:
            ranks.stopping, before = True, stats.cycles
    assert stats.cycles - before == cycles
    assert at < len(shown) < n
    assert shown == text[: len(shown)]
    assert cache.tokens == (prompt + shown)[:-1]
    ranks.stopping = False
    rest = mlx_mtp.generate_step(shown[-1:], model, max_tokens=5, **how)
    assert [token for token, *_ in rest] == text[len(shown) :][:5]
