"""Simulate first and later loads of released models: how long they take, and which kernels are on by then."""

import pytest
from first_load import MODELS, Mac, show, simulated
from sweep import sampled


@pytest.mark.parametrize("name", sampled([*MODELS][:1], MODELS))
def test_a_first_load_ends_with_kernels_on(name):
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
    assert first.pipelines < first.pipelines_later <= 45  # five numbers of rows of eight
