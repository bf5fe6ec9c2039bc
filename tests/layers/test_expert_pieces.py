"""Check that experts of several sequences are never sorted together, and one sequence's are as in mlx-lm."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import switch_layers

from mlx_mtp.layers.expert_rows import SORTED, cut_experts


@pytest.mark.parametrize("kind", [switch_layers.SwitchGLU, switch_layers.SwitchMLP])
@pytest.mark.parametrize(("texts", "rows"), [(7, 5), (3, 40), (1, 40)])
def test_sequences_have_the_bits_they_have_alone(monkeypatch, kind, texts, rows):
    model = nn.Sequential(kind(8, 6, 4))
    experts = model.layers[0]
    x = mx.random.normal((texts, rows, 8))
    chosen = mx.random.randint(0, 4, (texts, rows, 2)).astype(mx.uint32)
    alone = mx.concatenate([experts(x[i : i + 1], chosen[i : i + 1]) for i in range(texts)])
    sizes, real = [], switch_layers._gather_sort
    monkeypatch.setattr(switch_layers, "_gather_sort", lambda a, b: sizes.append(b.shape[0]) or real(a, b))
    experts(x, chosen)
    assert sizes == [texts]  # mlx-lm's own
    sizes.clear()
    cut_experts(model)
    assert mx.array_equal(experts(x, chosen), alone)
    assert sizes == ([1] * texts if 2 * rows >= SORTED else [])
