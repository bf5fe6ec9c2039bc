"""Check that RoPE with shared angles has the bits of MLX's own at every position and row count."""

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.rope_utils import Llama3RoPE

from mlx_mtp.layers.shared_rope import SharedRope, share_angles

ROPES = {
    "default": lambda dims: nn.RoPE(dims),
    "scaled": lambda dims: nn.RoPE(dims, base=5e6, scale=0.5),
    "llama3": lambda dims: Llama3RoPE(dims, base=5e5, scaling_config={"factor": 8.0}),
}


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU's kernel has bits of its own")
@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("rest", [0, 16])
def test_bits(kind, rest):
    rope, model = ROPES[kind](32), nn.Module()
    model.rope = shared = ROPES[kind](32)
    share_angles(model)
    assert isinstance(shared, SharedRope)
    for rows in (1, 2, 5, 300):
        for offset in (0, 1, 77, 8191, 123_456):
            for at in (offset, mx.array([offset])):
                x = mx.random.normal((1, 3, rows, 32 + rest))
                assert mx.array_equal(shared(x, offset=at), rope(x, offset=at)), (rows, at)
                assert mx.array_equal(shared(x[:, :1], offset=at), rope(x[:, :1], offset=at))
    half = mx.random.normal((1, 3, 2, 32)).astype(mx.bfloat16)
    assert mx.array_equal(shared(half, offset=3), rope(half, offset=3))


def test_only_equal_layers_share_angles():
    model = nn.Module()
    model.layers = [nn.Module() for _ in range(4)]
    ropes = [nn.RoPE(8), nn.RoPE(8), nn.RoPE(8, base=500.0), nn.RoPE(8, traditional=True)]
    for layer, rope in zip(model.layers, ropes, strict=True):
        layer.rope = rope
    share_angles(model)
    first, second, other, traditional = (layer.rope for layer in model.layers)
    assert first._angles is second._angles is not other._angles
    assert not isinstance(traditional, SharedRope)
