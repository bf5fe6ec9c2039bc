"""Test that a training on a CPU computes with float32 copies of quantized matrices, and puts these back."""

from types import SimpleNamespace

import lora
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import quantized_models
from mlx.utils import tree_flatten

import mlx_mtp
from mlx_mtp.checkpoint.adapters import load_adapters
from mlx_mtp.checkpoint.expand_heads import QUANTIZED
from mlx_mtp.layers.blocks import to_blocks
from mlx_mtp.layers.scaled import SCALE, ScaledLinear
from mlx_mtp.training import dense as denseness
from mlx_mtp.training.dense import dense
from mlx_mtp.training.reading import read
from mlx_mtp.training.tune import without_heads

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return quantized_models.save_checkpoints(tmp_path_factory.mktemp("quantized"))


def load(path):
    return mlx_mtp.load_model(path, kernels="off")


def contents(model):
    """Return everything that `dense` may change: the modules' types, and their arrays."""
    arrays = [id(w) for _, w in sorted(tree_flatten(model.parameters()))]
    return [type(module) for module in model.modules()], arrays


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("name", ["step", "hybrid"])
def test_the_rows_are_those_of_the_quantized_matrices(name, adapted, paths, tmp_path):
    model = load(paths[name])
    if adapted:
        load_adapters(model, lora.save(tmp_path / "adapter", model, seed=1, names=("o_proj", "up_proj")))
    before, own = contents(model), {id(w) for _, w in tree_flatten(model.parameters())}
    with dense(without_heads(model)) as size:
        rows, choices = read(model, TOKENS)
        heads = {id(module) for head in model.mtp for module in head.modules()}
        assert not [m for m in model.modules() if isinstance(m, QUANTIZED) and id(m) not in heads]
        assert size == sum(w.nbytes for _, w in tree_flatten(model.parameters()) if id(w) not in own)
    assert contents(model) == before
    assert rows.dtype == mx.float32
    model.set_dtype(mx.float32)  # the scales, too
    expected, chosen = read(model, TOKENS)
    np.testing.assert_allclose(rows, expected, rtol=2e-4, atol=2e-4)
    assert choices.tolist() == chosen.tolist()


def interrupted(model):
    with dense(model.modules()):
        raise KeyboardInterrupt


def test_an_interruption_puts_the_matrices_back(paths):
    model = load(paths["step"])
    before = contents(model)
    with dense(model.modules()):
        assert contents(model) != before
    with pytest.raises(KeyboardInterrupt):
        interrupted(model)
    assert contents(model) == before


@pytest.mark.parametrize("case", ["memory", "device", "float32"])
def test_nothing_changes_where_it_does_not_pay_or_fit(case, paths, monkeypatch):
    model = load(paths["step"])
    with dense(model.modules()) as size:
        pass
    if case == "memory":
        have = SimpleNamespace(bytes=int(size / denseness.SHARE) - 1)
        monkeypatch.setattr(denseness, "available", lambda: have)
    elif case == "device":
        monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    else:
        model = nn.Linear(32, 32)
    before = contents(model)
    with dense(model.modules()) as size:
        assert size == 0
        assert contents(model) == before


def test_other_formats_stay_as_they_are():
    """Tensor-wide scales, and GGUF's block formats, next to one of MLX's own."""
    scaled = nn.Linear(32, 8).to_quantized(group_size=32, bits=4)
    scaled[SCALE] = mx.ones(1)
    scaled.__class__ = ScaledLinear
    model = nn.Sequential(
        nn.Linear(32, 8).to_quantized(group_size=32, bits=4), scaled, to_blocks(nn.Linear(256, 8), "q6_k")
    )
    model.set_dtype(mx.bfloat16)  # the scales, too, which stay
    before, codes = model.layers[1:], model.layers[2].scales
    with dense(model.modules()) as size:
        assert size == 4 * 8 * 32
        assert type(model.layers[0]) is nn.Linear
        assert all(now is then for now, then in zip(model.layers[1:], before, strict=True))
        assert scaled.scales.dtype == mx.bfloat16
        assert model.layers[2].scales is codes
