"""Copies are drafted where they pay although a rejected draft costs a further pass, and nowhere else."""

import random

import pytest

from mlx_mtp.tuning.controller import Controller
from mlx_mtp.tuning.plan import Cycle

TOKENS = 1500


def decode(right: float, *, rereads: bool) -> tuple[float, float]:
    """Return tokens per plain step, and the share of cycles with copies. right: probability of each copied token."""
    draws, control = random.Random(1), Controller(max_drafts=0, max_lookup=15, rereads=rereads)
    tokens, steps, copies, cycles = 0, 0.0, 0, 0
    while tokens < TOKENS:
        plan, accepted = control.plan(matched=20), 0
        while accepted < plan.k and draws.random() < right:
            accepted += 1
        cost = 1 + 0.1 * plan.k
        control.observe(Cycle(plan, plan.k, accepted, 0.02 * cost * draws.gauss(1, 0.03), matched=20))
        tokens, steps = tokens + accepted + 1, steps + cost * (1 + (rereads and accepted < plan.k))
        copies, cycles = copies + (plan.k > 0), cycles + 1
    return tokens / steps, copies / cycles


@pytest.mark.parametrize(("right", "pays"), [(0.98, True), (0.9, True), (0.6, False), (0.2, False)])
def test_copies_that_are_read_again(right, pays):
    rate, share = decode(right, rereads=True)
    assert (share > 0.8, share < 0.15) == (pays, not pays)
    assert rate > (1.3 if pays else 0.97)


def test_without_reading_again_more_copies_pay():
    assert decode(0.6, rereads=False)[1] > 0.8


@pytest.mark.parametrize("k", [3, 7])
def test_the_estimate_is_the_mean_of_all_outcomes(k):
    """A cycle with a rejected draft costs twice; the risk is that of a cycle without an accepted one."""
    control = Controller(max_drafts=0, max_lookup=k, rereads=True)
    (choice,) = (c for c in control._choices(20, 0) if c.plan.k == 3)
    rates, cost = control._rates("lookup 5", 3), control.costs.steps(choice.plan)
    whole = rates[0] * rates[1] * rates[2]
    assert choice.steps == pytest.approx(whole * cost + (1 - whole) * 2 * cost)
    assert choice.risk == pytest.approx(2 * cost - 1)
