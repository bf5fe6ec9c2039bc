"""Compare all of mlx-lm's Metal kernels, unmodified, with their references in plain mx ops (float32)."""

import mlx.core as mx
import mlx_lm.kernels as kernels
import numpy as np
import pytest
from metal_cases import linux_only
from mlx import nn
from mlx_lm.models import bitlinear_layers, deepseek_v41, kimi_k3, rwkv7, ssm
from mlx_lm.models import gated_delta as gated
from mlx_lm.tuner import losses
from sweep import sampled, sweep

from mlx_mtp import emulator

pytestmark = linux_only


@pytest.fixture(autouse=True)
def launches():
    """The reports of a test's launches; there must be some, or the test would compare mx ops with themselves."""
    mx.random.seed(0)
    with emulator.emulated() as launches:
        yield launches


def close(got, want, tolerance=2e-6):
    scale = max(float(mx.abs(want).max()), 1e-6)
    assert float(mx.abs(got.astype(mx.float32) - want.astype(mx.float32)).max()) <= tolerance * scale


def recurrent(dk=128, vector=False, t=3):
    b, hk, hv, dv = 2, 2, 4, 8
    q, k = (mx.random.normal((b, t, hk, dk)) * 0.1 for _ in range(2))
    g = mx.random.uniform(shape=(b, t, hv, dk) if vector else (b, t, hv))
    beta = mx.random.uniform(shape=(b, t, hv))
    return q, k, mx.random.normal((b, t, hv, dv)), g, beta, mx.random.normal((b, hv, dv, dk))


@pytest.mark.parametrize(("dk", "vector", "masked"), [(128, 0, 0), (64, 0, 0), (64, 0, 1), (64, 1, 0), (64, 1, 1)])
def test_gated_delta(dk, vector, masked, launches):
    data = recurrent(dk, vector)
    mask = mx.array([[True, True, False], [True, False, True]]) if masked else None
    y, state = gated.gated_delta_kernel(*data, mask)
    want_y, want_state = gated.gated_delta_ops(*data, mask)
    rows = mx.ones((2, 3)) if mask is None else mask
    close(y * rows[..., None, None], want_y * rows[..., None, None])
    close(state, want_state)
    assert [launch.kernel for launch in launches] == [
        "gated_delta_step" + "_vec" * vector + "_mask" * masked if dk != 128 else launches[0].kernel
    ]


def test_gated_delta_packed_and_tree_and_plain_give_the_same_bits(launches):
    data = recurrent()
    packed, tree, plain = (
        f(*data)
        for f in (gated.gated_delta_kernel, gated.gated_delta_kernel_xtree, gated.gated_delta_kernel_unpacked)
    )
    for a, b, c in zip(packed, tree, plain, strict=True):
        assert mx.array_equal(a, b)
        assert mx.array_equal(a, c)
    assert len({launch.kernel for launch in launches}) == 3


def test_a_gated_delta_block_equals_its_steps():
    q, k, v, g, beta, state = recurrent(64, t=4)
    y, end = gated.gated_delta_kernel(q, k, v, g, beta, state)
    for t in range(4):
        row = slice(t, t + 1)
        step, state = gated.gated_delta_kernel(q[:, row], k[:, row], v[:, row], g[:, row], beta[:, row], state)
        assert mx.array_equal(step, y[:, row])
    assert mx.array_equal(state, end)


def test_gated_delta_update_picks_the_kernel(launches):
    q, k, v, g, beta, state = recurrent(64)
    more = {"A_log": mx.random.normal((4,)), "dt_bias": mx.random.normal((4,)), "state": state}
    got = gated.gated_delta_update(q, k, v, g, beta, **more)
    assert len(launches) == 1
    want = gated.gated_delta_update(q, k, v, g, beta, **more, use_kernel=False)
    close(got[0], want[0])
    close(got[1], want[1])


def test_ssm(launches):
    b, h, d, s = 2, 4, 8, 64
    x, skip, dt = mx.random.normal((b, 1, h, d)), mx.random.normal((h,)), mx.random.normal((b, 1, h))
    bc = [mx.random.normal((b, 1, 2, s)) for _ in range(2)]
    data = (x, mx.random.normal((h,)), *bc, skip, dt, mx.random.normal((h,)), mx.random.normal((b, h, d, s)))
    got = ssm.ssm_update(*data, (0.001, 100.0))
    assert [launch.kernel for launch in launches] == ["ssm_kernel"]
    for a, b in zip(got, ssm.ssm_attn(*data, (0.001, 100.0)), strict=True):
        close(a, b)


def test_rwkv7():
    data = [mx.random.normal((2, 3, 2, 64)) * 0.3 for _ in range(6)]
    state = mx.random.normal((2, 2, 64, 64))
    y, end = rwkv7.wkv7_kernel(*data, state)
    for t in range(3):
        want, state = rwkv7._wkv7_step_ops(*[x[:, t] for x in data], state)
        close(y[:, t], want.reshape(2, 2, 64))
    close(end, state)


@pytest.mark.parametrize("n", sampled([300], [1, 10, 300]))
def test_sinkhorn(n, monkeypatch, launches):
    comb, eps = mx.random.uniform(shape=(n, 4, 4)), mx.array([1e-6])
    got = deepseek_v41._sinkhorn(comb, iters=3, eps=eps)
    assert len(launches) == 1
    monkeypatch.setattr(deepseek_v41, "_sinkhorn_kernel", None)
    close(got, deepseek_v41._sinkhorn(comb, iters=3, eps=eps))


def test_attention_residuals(launches):
    blocks = kimi_k3.ResidualBlocks(1e-6)
    for _ in range(3):
        blocks.append(mx.random.normal((2, 5, 96)))
    partial, w = mx.random.normal((2, 5, 96)), mx.random.normal((96,))
    got = kimi_k3._attn_res_mix(blocks, partial, w, 1e-6)
    assert len(launches) == 1
    close(got, kimi_k3._attn_res_mix(blocks, partial, w, 1e-6, use_kernel=False))


@pytest.mark.parametrize("invert", sampled([True], [False, True]))
def test_bitlinear(invert):
    layer = bitlinear_layers.BitLinear(256, 32, bias=False, invert_weight_scales=invert)
    trits = mx.random.randint(0, 3, (4, 8, 256))
    layer.weight = sum(trits[i] << (2 * i) for i in range(4)).astype(mx.uint8)
    layer.weight_scale = mx.array([0.5])
    x = mx.random.normal((3, 256))
    close(layer(x), x @ (trits.reshape(32, 256) - 1).astype(mx.float32).T * (2.0 if invert else 0.5))


def rms(x, eps=1e-5):
    return x * mx.rsqrt((x * x).mean(-1, keepdims=True) + eps)


def test_qk_norm_and_rope():
    heads, kv, d = 3, 2, 40
    x = mx.random.normal((2, 4, 2 * (heads + kv) * d))
    more = {"n_heads": heads, "n_kv_heads": kv, "head_dim": d, "eps": 1e-5, "query_scale": 0.25}
    q, k = kernels.qk_norm(x, **more)
    both = rms(x[..., : (heads + kv) * d].reshape(2, 4, heads + kv, d))
    close(q, both[:, :, :heads] * 0.25)
    close(k, both[:, :, heads:])
    for offset in (7, mx.array([3, 11])):
        rq, rk = kernels.qk_norm_rope(x, **more, rope_base=1e4, offset=offset)
        for got, plain in ((rq, q), (rk, k)):
            want = mx.fast.rope(
                plain.transpose(0, 2, 1, 3), d, traditional=True, base=1e4, scale=1.0, offset=offset
            ).transpose(0, 2, 1, 3)
            close(got, want, 1e-5)


def test_expert_routing():
    logits, bias = mx.random.normal((5, 40)), mx.random.normal((40,)) * 0.1
    chosen, weights = kernels.expert_routing(logits, bias, top_k=4, multiplier=1.5, score_eps=1e-6, route_scale=2.0)
    scores = mx.sigmoid(logits * 1.5)
    want = mx.argsort(-(scores + bias), axis=-1)[:, :4]
    assert np.array_equal(np.array(chosen), np.array(want))
    picked = mx.take_along_axis(scores, want, axis=-1)
    close(weights, picked / (picked.sum(-1, keepdims=True) + 1e-6) * 2.0)


@pytest.mark.parametrize("d", sampled([72], [72, 1024]))
def test_expert_norm_and_combine(d):
    experts, weights, norm = mx.random.normal((3, 2, d)), mx.random.uniform(shape=(3, 2)), mx.random.normal((d,))
    got = kernels.post_expert_norm_combine(experts, weights, norm_weight=norm, eps=1e-5)
    close(got, (rms(experts * norm) * weights[..., None]).sum(1))


def test_norm_and_gate_of_views():
    x = mx.random.normal((2, 5, 3, 48)).transpose(0, 2, 1, 3)
    gate = mx.random.normal((2, 5, 3 * 48 * 2))[..., ::2]
    got = kernels.rms_norm_sigmoid_gate(x, gate, eps=1e-5)
    want = rms(x).transpose(0, 2, 1, 3).reshape(2, 5, -1) * mx.sigmoid(gate)
    close(got, want)


@pytest.mark.parametrize(("d", "scaled"), sampled([(768, True)], [(72, False), (768, True)]))
def test_norm_add_norm(d, scaled):
    branch, stream, alpha, beta, weight = (mx.random.normal(s) for s in ((3, d), (3, d), (d,), (d,), (d,)))
    norm = nn.RMSNorm(d, eps=1e-5)
    norm.weight = mx.random.normal((d,))
    more = {"alpha": alpha, "beta": beta, "post_weight": weight if scaled else None, "post_eps": 1e-5}
    new, normed = kernels.norm_add_norm(branch, stream, **more, next_norm=norm)
    want = alpha * stream + beta * rms(branch * weight if scaled else branch)
    close(new, want)
    close(normed, rms(want) * norm.weight)
    alone, nothing = kernels.norm_add_norm(branch, stream, **more, next_norm=None)
    assert nothing is None
    assert mx.array_equal(alone, new)
    assert mx.array_equal(kernels.pre_norm(new, norm, dtype=mx.float32), normed)


def loss_inputs():
    return mx.random.normal((2, 5000)), mx.random.normal((2, 5000))


@pytest.mark.parametrize("loss", sampled(["kl"], ["kl", "js"]))
def test_the_published_loss_kernels_have_a_race(loss, launches):
    """A simdgroup stores its sum of exponentials where a slower one has not yet read the maxima."""
    kernel = getattr(losses, f"_{loss}_div_loss")
    with pytest.raises(emulator.KernelFault, match=r"race: reads threadgroup array shared\[0\]") as error:
        kernel(*loss_inputs())
    assert "wrote at" in str(error.value)
    assert "sum_exp_q" in str(error.value)
    assert not launches


@pytest.mark.parametrize("loss", sampled(["js"], ["kl", "js"]))
def test_the_loss_kernels_with_added_barriers(loss, monkeypatch):
    q, p = loss_inputs()
    kernel = getattr(losses, f"_{loss}_forward_kernel")
    old = "        // Share the sum_exp across the threadgroup\n"
    assert old in kernel.source
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);\n"
    monkeypatch.setattr(kernel, "source", kernel.source.replace(old, barrier).replace("mem_none", "mem_threadgroup"))
    got = getattr(losses, f"_{loss}_div_loss")(q, p)
    monkeypatch.setattr(losses, "can_run_metal", lambda: False)
    close(got[0] if loss == "js" else got, getattr(losses, f"{loss}_div_loss")(q, p), 1e-5)


@sweep
@pytest.mark.parametrize("loss", ["kl", "js"])
def test_the_loss_gradients(loss, monkeypatch):
    """The backward kernels have the same race, and return the gradient once barriers are added."""
    q, p = loss_inputs()
    cotangent, log_q, log_p = mx.array([1.0, -0.5]), *(x - mx.logsumexp(x, axis=-1, keepdims=True) for x in (q, p))
    kl_q = (mx.exp(log_q) * (log_q - mx.logaddexp(log_q, log_p) + mx.log(mx.array(2.0)))).sum(-1)
    with monkeypatch.context() as patch:
        patch.setattr(losses, "can_run_metal", lambda: False)
        want = mx.vjp(lambda x: getattr(losses, f"{loss}_div_loss")(x, p), [q], [cotangent])[1][0]
    kernel = getattr(losses, f"_{loss}_backward_kernel")
    launch = {
        "inputs": [q, p, cotangent, *([kl_q] if loss == "js" else [])],
        "template": [("T", mx.float32), ("V", q.shape[-1])],
        "grid": (1024, 2, 1),
        "threadgroup": (1024, 1, 1),
        "output_shapes": [q.shape],
        "output_dtypes": [mx.float32],
    }
    with pytest.raises(emulator.KernelFault, match=r"race: reads threadgroup array shared\[0\]"):
        kernel(**launch)
    old, barrier = "// Share the sum_exp across the threadgroup", "threadgroup_barrier(mem_flags::mem_threadgroup);"
    assert old in kernel.source
    monkeypatch.setattr(kernel, "source", kernel.source.replace(old, barrier).replace("mem_none", "mem_threadgroup"))
    close(kernel(**launch)[0], want, 1e-5)
