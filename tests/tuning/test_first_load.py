"""Simulate first and later loads of released models: how long they take, and which kernels are on by then."""

import pytest
from first_load import MODELS, Mac, show, simulated
from sweep import sampled

from mlx_mtp.tuning import lane
from mlx_mtp.tuning.lane_costs import measured


@pytest.mark.parametrize("name", sampled([*MODELS][:1], MODELS))
def test_a_first_load_ends_with_kernels_on(name, monkeypatch):
    """It times the kernels of both lanes."""
    monkeypatch.setattr(lane, "measured", measured)
    first, later = simulated(name, Mac())
    show((first, later))
    assert 0 < first.pipelines <= 40
    assert later.pipelines <= 40
    assert 0 < first.decisions <= 40
    assert (later.decisions, first.in_cycles, later.in_cycles) == (0, 0, 0)
    assert first.seconds <= 15
    assert later.seconds <= 5
    assert first.on == later.on >= 0.7 * first.of
    assert first.on < first.on_later == later.on_later
    assert first.pipelines < first.pipelines_later <= 48  # five numbers of rows of eight, and two of the other lane
