"""Test that quantized heads are dequantized on a CPU, where that is faster, and nowhere else."""

import families
import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

import mlx_mtp
from mlx_mtp.checkpoint import expand_heads
from mlx_mtp.checkpoint.convert import convert
from mlx_mtp.layers.blocks import BlockLinear

IN_8_BITS = {"mtp_q_bits": 8, "mtp_q_group_size": 32}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A dense model with one head, whose rows are whole groups of 32."""
    return families.build("mimo", tmp_path_factory.mktemp("released"), hidden_size=32, intermediate_size=32)[0]


@pytest.fixture
def any_size(monkeypatch):
    """Heads of any size are expanded."""
    monkeypatch.setattr(expand_heads, "LEAST", 1)


def tokens(model, k):
    return [token for token, *_ in mlx_mtp.generate_step([1, 2, 3], model, max_tokens=6, num_draft_tokens=k)]


def test_quantized_heads_become_float32(released, tmp_path, any_size):
    """Their values and the text stay, and a load without kernels, as of `tune-heads`, keeps the stored format."""
    path = convert(released, tmp_path / "new", dtype="float32", **IN_8_BITS).path
    model, stored = mlx_mtp.load_model(path), mlx_mtp.load_model(path, kernels="off")
    mine, theirs = (m.mtp[0].block.mlp.up_proj for m in (model, stored))
    wide = mx.dequantize(theirs.weight, theirs.scales, theirs.biases, group_size=theirs.group_size, bits=theirs.bits)
    assert type(mine) is nn.Linear
    assert type(theirs) is nn.QuantizedLinear
    assert mine.weight.dtype == mx.float32
    assert mx.array_equal(mine.weight, wide)
    assert "expanded to float32 for the CPU" in str(model.report)
    assert "expanded" not in str(stored.report)
    assert model.report.head_bytes > stored.report.head_bytes
    assert tokens(model, 2) == tokens(stored, 2) == tokens(model, 0)


@pytest.mark.parametrize(
    ("least", "options"),
    [
        (1 << 30, {"dtype": "float32"}),  # small heads
        (1, {"dtype": "bfloat16"}),
        (1, {"dtype": "float32", "quantize": True, "q_bits": 4, "q_group_size": 32}),
    ],
)
def test_other_heads_keep_their_format(released, tmp_path, monkeypatch, least, options):
    monkeypatch.setattr(expand_heads, "LEAST", least)
    model = mlx_mtp.load_model(convert(released, tmp_path / "new", **options, **IN_8_BITS).path)
    assert type(model.mtp[0].block.mlp.up_proj) is nn.QuantizedLinear
    assert "8-bit affine g32" in str(model.report)
    assert "expanded" not in str(model.report)


def test_heads_with_scales_of_16_bits_become_float32(released, tmp_path, any_size):
    model = mlx_mtp.load_model(convert(released, tmp_path / "new", dtype="float32", **IN_8_BITS).path, kernels="off")
    model.mtp[0].set_dtype(mx.float16)
    expand_heads.expand_heads(model)
    assert {w.dtype for _, w in tree_flatten(model.mtp[0].parameters())} == {mx.float32}


def test_heads_in_block_formats_are_not_read_by_mlx_lm(released, tmp_path, any_size):
    model = mlx_mtp.load_model(convert(released, tmp_path / "new", dtype="float32", **IN_8_BITS).path, kernels="off")
    model.mtp[0].block.mlp.up_proj.__class__ = BlockLinear
    expand_heads.expand_heads(model)
    assert type(model.mtp[0].block.mlp.up_proj) is BlockLinear
    assert type(model.mtp[0].block.mlp.down_proj) is nn.QuantizedLinear
