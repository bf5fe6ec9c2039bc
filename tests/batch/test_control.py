"""The number of drafts follows costs that are measured per number of sequences, starting from the nearest number."""

import time
from types import SimpleNamespace

import pytest

from mlx_mtp.decoding import control as controls
from mlx_mtp.decoding.clock import Clock
from mlx_mtp.decoding.control import Controls, outcome
from mlx_mtp.decoding.drafters.forced import Forced
from mlx_mtp.decoding.flight import Flight
from mlx_mtp.decoding.redraft import redrafted
from mlx_mtp.tuning.costs import dense
from mlx_mtp.tuning.plan import PLAIN, Accepted, Fixed, Plan


@pytest.fixture
def known(monkeypatch):
    found = SimpleNamespace(together={}, growth=dense)
    monkeypatch.setattr(controls, "learned", lambda model: found)
    return found.together


def drive(control, cost: float, cycles: int = 150) -> list[int]:
    """Run cycles of two sequences; a draft costs `cost` plain steps. Return the number of drafts of each."""
    ks = []
    for _ in range(cycles):
        plan = control.plan()
        ks.append(plan.k)
        right = [min(plan.k, len(ks) % 5), plan.k]
        flight = read(plan, plan.k, [(a, plan.k) for a in right], 0)
        control.observe(outcome(flight, 0.01 * (1 + cost * plan.k)))
    return ks


def test_drafts_follow_the_costs_of_the_number_of_sequences(known):
    """Drafts are cheap at two sequences and expensive at eight; another batch uses both, and acceptance at five."""
    batch = Controls(SimpleNamespace(drafter=None, mtp=(), windows=list), adaptive=True)
    assert drive(batch.control(2, 3), 0.1)[-20:].count(3) >= 16
    assert drive(batch.control(8, 3), 1.2)[-20:].count(0) >= 16
    again = Controls(SimpleNamespace(drafter=None, mtp=(), windows=list), adaptive=True)
    assert again.control(2, 3).plan().k > 0
    assert again.control(8, 3).plan().k == 0
    estimate = again.control(5, 3).costs
    assert estimate.counts["heads"]
    assert (estimate.pace, estimate.plain_first) == (None, 3)
    assert again.control(7, 3).costs.levels == known[8].levels
    assert sorted(known) == [2, 5, 7, 8]


def test_a_fixed_number_of_drafts_is_not_learned(known):
    controls = Controls(SimpleNamespace(drafter=None, mtp=(), windows=list), adaptive=False)
    assert isinstance(controls.control(4, 3), Fixed)
    assert known == {}


def test_the_outcome_of_several_sequences():
    """Of three sequences one may accept a single draft; at the second depth two may accept, and one does."""
    cycle = outcome(read(Plan(k=2), 2, [(2, 2), (0, 2), (1, 1)], 7), 0.5)
    assert (cycle.accepted, cycle.verified, cycle.seconds, cycle.prefilled) == (1.0, 2, 0.5, 7)
    assert cycle.depths == ((2 / 3, 1.0), (1 / 3, 1 / 3))
    for plan, counts in ((PLAIN, (0, 0)), (Plan(k=2), (1, 2))):
        assert outcome(read(plan, plan.k, [counts], 0), None).depths == ()


@pytest.mark.parametrize(
    ("k", "forced", "expected"),
    [(2, [2, 2], None), (2, [5, 0], 5), (2, [4, 0], None), (0, [1, 0], 1), (2, [3, 2], 3), (0, [0, 0], None)],
)
def test_forced_drafts_are_the_plan_if_they_are_more_in_sum(k, forced, expected):
    planned = Plan(k=k)
    assert redrafted(Fixed(k), planned, forced) == (planned if expected is None else Plan(Forced.source, expected))


def read(plan: Plan, verified: int, counts: list[tuple[int, int]], prefilled: int) -> Flight:
    """Return a cycle that was read, with the (accepted drafts, limit) of each sequence."""
    flight = Flight([None] * len(counts), plan, prefilled=prefilled)
    flight.run, flight.context = SimpleNamespace(verified=verified), 0
    flight.kept = [Accepted(*each) for each in counts]
    return flight


def test_hidden_cycles_are_not_timed(monkeypatch):
    """Hidden by other work, or by a caller that takes longer than the device."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock()
    clock.hidden = True

    def cycle(caller: float, device: float, waited: float, *, late: bool = False) -> float | None:
        clock.leave()
        now[0] += caller
        clock.resume()
        now[0] += device
        return clock.arrived(waited, 0.0, 0.0, late=late)

    assert cycle(0, 1, 1) is None  # the first
    assert cycle(0, 2, 1) == pytest.approx(2)
    assert cycle(5, 1, 0) is None
    assert cycle(5, 1, 1, late=True) == pytest.approx(1)  # it was built after the caller returned
    clock.hidden = True
    assert cycle(0, 2, 1) is None
