"""Compare experts of a squared ReLU (Nemotron-3) with MLX's products, and the blocks that contain them."""

from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import pytest
from exact import DTYPES, same_bits
from metal_cases import exact, linux_only, relative_error
from mlx_lm.models import nemotron_h
from moe_blocks import quantized, visits
from sweep import sampled

from mlx_mtp import emulator
from mlx_mtp.emulator import stock
from mlx_mtp.kernels import Experts, Routing, verify_moe, verify_moe_ref
from mlx_mtp.layers.experts import Mixture, VerifyMoE, servable
from mlx_mtp.tuning.kernel_sites import _swap

pytestmark = linux_only
CONFIG = {
    **{"hidden_size": 64, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48, "mlp_bias": False},
    **{"n_routed_experts": 20, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    **{"norm_topk_prob": True, "routed_scaling_factor": 2.5},
}


def block_of(latent: int | None, dtype: mx.Dtype = mx.float32):
    mx.random.seed(11)
    block = nemotron_h.NemotronHMoE(SimpleNamespace(**CONFIG, moe_latent_size=latent))
    block.gate.weight = mx.random.normal((20, 64)) * 0.3
    block.gate.e_score_correction_bias = mx.random.normal((20,)) * 0.1
    block.set_dtype(dtype)
    nn.quantize(block.switch_mlp, 32, 4)
    return block


@pytest.mark.parametrize("dtype", sampled([mx.bfloat16], DTYPES), ids=str)
def test_products_have_the_bits_of_mlx(dtype):
    """One expert per row, with weight 1; the one that twelve rows visit is requested twice, the others once."""
    up, down = (
        quantized(linear) for linear in block_of(None, dtype).switch_mlp.values() if hasattr(linear, "scales")
    )
    experts, rows = Experts(None, up, down), [3, 0, *[5] * 12, 7]
    x = mx.random.normal((15, 64)).astype(dtype)
    logits = visits([[e] for e in rows], 20)
    with emulator.emulated() as launches:
        y = verify_moe(x, logits, experts, Routing("sigmoid", 1))
    assert [launch.kernel for launch in launches] == ["moe_route", "moe_relu2", "moe_down"]
    assert launches[1]["up"].bytes_read == launches[2]["w"].bytes_read == 5 * up.w[0].nbytes

    def gathered(x, w):
        arrays, pairs = (w.w, w.scales, w.biases), mx.arange(15)
        return stock.gather_qmv(x[:, None], *arrays, pairs, mx.array(rows), group_size=32, bits=4)[0][:, 0]

    assert same_bits(y, gathered(nn.relu2(gathered(x, up)), down))
    rounding = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 2e-2}[dtype]
    assert relative_error(y, exact(verify_moe_ref(x, logits, experts, Routing("sigmoid", 1)))) < rounding


@pytest.mark.parametrize("latent", [None, 32])
def test_a_block_is_what_mlx_lm_computes(latent):
    block = block_of(latent, mx.bfloat16)
    x = mx.random.normal((1, 6, 64), key=mx.random.key(1)).astype(mx.bfloat16)
    assert servable(block)
    want = block(x)
    site = _swap(block, "mixture", Mixture(block), VerifyMoE)
    assert site.width == (latent or 64) + 20
    assert site.shape.startswith(f"20x32x{latent or 64} relu²")
    site.rows = frozenset({6})
    with emulator.emulated(emulator.Options(traffic=False)) as launches:
        y = block(x)
    assert [launch.kernel for launch in launches] == ["moe_route", "moe_relu2", "moe_down"]
    assert relative_error(y, exact(want)) < 2e-2
    block.switch_mlp.activation = nn.GELU()
    assert not servable(block)


def test_matrices_that_do_not_fit_without_a_gate():
    up, _ = (quantized(linear) for linear in block_of(None).switch_mlp.values() if hasattr(linear, "scales"))
    with pytest.raises(
        ValueError, match=r"down is \[20, 32, 64\].*; with up \[20, 32, 64\].* it must be \[20, 64, 32\]"
    ):
        Experts(None, up, up)
