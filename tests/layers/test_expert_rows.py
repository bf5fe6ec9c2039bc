"""Check that products with chosen experts have mlx-lm's bits and compute no row indices."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models import switch_layers

from mlx_mtp.bench.census import operations
from mlx_mtp.layers.expert_rows import NumberedRows, number_rows


@pytest.mark.parametrize("kind", [switch_layers.SwitchGLU, switch_layers.SwitchMLP])
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (3, 2), (5,), (1, 40)])  # the last one is sorted
def test_bits_are_mlx_lms(kind, shape):
    model = nn.Sequential(kind(64, 32, 8))
    nn.quantize(model, group_size=32, bits=4)
    x, chosen = mx.random.normal((*shape, 64)), mx.random.randint(0, 8, (*shape, 2)).astype(mx.uint32)
    mx.eval(model.parameters(), x, chosen)
    theirs = model.layers[0](x, chosen)
    number_rows(model.modules())
    ours = model.layers[0](x, chosen)
    counted = chosen.size >= 64
    assert operations(theirs)["Arange"]
    assert bool(operations(ours)["Arange"]) == counted
    assert mx.array_equal(ours, theirs)


def test_only_products_without_biases():
    model = nn.Sequential(switch_layers.SwitchGLU(64, 32, 4), switch_layers.SwitchGLU(64, 32, 4, bias=True))
    nn.quantize(model, group_size=32, bits=4)
    number_rows(model.modules())
    numbered = [isinstance(glu.up_proj, NumberedRows) for glu in model.layers]
    assert numbered == ["bias" not in glu.up_proj for glu in model.layers]
