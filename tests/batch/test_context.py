"""A controller receives the context of each cycle: of several sequences, the longest."""

import pytest

import mlx_mtp
from mlx_mtp.tuning.controller import Controller

PROMPTS = [[1, 2, 3, 4] * 5, [2, 2, 1]]


@pytest.fixture
def contexts(monkeypatch):
    found, observe = [], Controller.observe
    monkeypatch.setattr(Controller, "observe", lambda self, cycle: found.append(cycle) or observe(self, cycle))
    return found


def test_one_sequence(tiny_models, contexts):
    model, _ = tiny_models(0)
    assert len([*mlx_mtp.generate_step(PROMPTS[0], model, max_tokens=12)]) == 12
    positions = [len(PROMPTS[0])]
    for cycle in contexts:
        positions.append(positions[-1] + int(cycle.accepted) + 1)
    assert [cycle.context for cycle in contexts] == positions[:-1]


def test_several_sequences(tiny_models, contexts):
    model, _ = tiny_models(0)
    batch = mlx_mtp.BatchGenerator(model)
    batch.insert(PROMPTS, [12, 4])
    while batch.next_generated():
        pass
    together = [cycle.context for cycle in contexts]
    assert together == sorted(together)
    assert together[0] >= len(PROMPTS[0])
