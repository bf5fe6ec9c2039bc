"""Create small blocks of mlx-lm's experts, and the arguments of `verify_moe` for each."""

import functools
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import (
    deepseek_v3,
    glm4_moe,
    glm4_moe_lite,
    mimo_v2_flash,
    nemotron_h,
    qwen3_moe,
    qwen3_next,
    step3p5,
)

from mlx_mtp import emulator
from mlx_mtp.kernels import Experts, Quantized, Routing
from mlx_mtp.kernels._routing import Pairs, route_metal

H, INNER, E, TOP_K = 64, 32, 160, 8
LIMIT = 0.02
NEMOTRON = {"moe_latent_size": None, "moe_shared_expert_intermediate_size": INNER, "mlp_bias": False}


def quantized(linear) -> Quantized:
    """Return a QuantizedSwitchLinear's weights."""
    ends = (linear.weight.shape[1],)
    return Quantized(
        linear.weight, linear.scales, linear.get("biases"), linear.group_size, linear.bits, linear.mode, ends
    )


def experts_of(block) -> Experts:
    switch = block.switch_mlp
    if "fc1" in switch:
        return Experts(None, quantized(switch.fc1), quantized(switch.fc2))
    return Experts(*(quantized(linear) for linear in (switch.gate_proj, switch.up_proj, switch.down_proj)))


def step(limit: float = 0.0):
    config = step3p5.ModelArgs(
        model_type="step3p5",
        hidden_size=H,
        num_hidden_layers=1,
        vocab_size=8,
        num_attention_heads=1,
        num_attention_groups=1,
        head_dim=8,
        intermediate_size=INNER,
        moe_num_experts=E,
        moe_top_k=TOP_K,
        moe_intermediate_size=INNER,
        share_expert_dim=INNER,
        swiglu_limits=[limit],
    )
    block = step3p5.Step3p5MoE(config, 0)
    gate = block.gate
    gate.router_bias = mx.random.normal((E,)) * 0.1
    routing = Routing("sigmoid", gate.top_k, norm=gate.norm_topk_prob, eps=1e-20, scale=gate.routed_scaling_factor)
    return block, routing, lambda x: (gate.gate(x), {"bias": gate.router_bias, "shared": block.share_expert(x)})


def noaux(
    module, name: str, eps: float, n_group: int, topk_group: int, shared: int | None = 1, top_k: int = TOP_K, **more
):
    """Return the block of GLM-4, DeepSeek-V3, MiMo and Nemotron-3: one gate, written out in each port."""
    config = SimpleNamespace(
        hidden_size=H,
        intermediate_size=INNER,
        moe_intermediate_size=INNER,
        num_experts_per_tok=top_k,
        n_routed_experts=E,
        n_shared_experts=shared,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        n_group=n_group,
        topk_group=topk_group,
        topk_method="noaux_tc",
        hidden_act="silu",
        **more,
    )
    block = getattr(module, name)(config)
    gate = block.gate
    gate.weight = mx.random.normal((E, H)) * 0.2
    gate.e_score_correction_bias = mx.random.normal((E,)) * 0.1
    norm = gate.norm_topk_prob and gate.top_k > 1
    routing = Routing("sigmoid", gate.top_k, n_group, topk_group, norm, eps, gate.routed_scaling_factor)

    def inputs(x):
        more = {"shared": block.shared_experts(x)} if shared else {}
        return x @ gate.weight.T, {"bias": gate.e_score_correction_bias, **more}

    return block, routing, inputs


def qwen(module, name: str):
    config = SimpleNamespace(
        hidden_size=H,
        moe_intermediate_size=INNER,
        shared_expert_intermediate_size=INNER,
        num_experts=E,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
    )
    block = getattr(module, name)(config)
    routing = Routing("softmax", block.top_k, norm=block.norm_topk_prob)

    def inputs(x):
        if "shared_expert" not in block:
            return block.gate(x), {}
        return block.gate(x), {"shared": block.shared_expert(x), "shared_gate": block.shared_expert_gate(x)}

    return block, routing, inputs


FAMILIES = {
    "step3p5": lambda: step(),
    "step3p5, clamped": lambda: step(LIMIT),
    "glm4_moe": lambda: noaux(glm4_moe, "MoE", 0.0, 1, 1),
    "glm4_moe_lite": lambda: noaux(glm4_moe_lite, "Glm4MoeLiteMoE", 1e-20, 1, 1),
    "deepseek_v3": lambda: noaux(deepseek_v3, "DeepseekV3MoE", 0.0, 8, 4),
    "mimo_v2_flash": lambda: noaux(mimo_v2_flash, "MoE", 1e-20, 4, 4, None),
    "nemotron_h": lambda: noaux(nemotron_h, "NemotronHMoE", 1e-20, 1, 1, top_k=22, **NEMOTRON),
    "qwen3_next": lambda: qwen(qwen3_next, "Qwen3NextSparseMoeBlock"),
    "qwen3_moe": lambda: qwen(qwen3_moe, "Qwen3MoeSparseMoeBlock"),
}


@functools.cache
def make(family: str):
    """Return (block, its Routing, limit, a function of x [M, H] that returns logits and arguments of verify_moe)."""
    mx.random.seed(5)
    block, routing, inputs = FAMILIES[family]()
    nn.quantize(block.switch_mlp, 32, 4)
    return block, routing, LIMIT if "clamped" in family else None, inputs


def visits(rows: list[list[int]], e: int) -> mx.array:
    """Return logits with which row i visits rows[i], later experts with larger weights."""
    logits = np.full((len(rows), e), -9.0, np.float32)
    for i, visited in enumerate(rows):
        logits[i, visited] = np.linspace(0.5, 2, len(visited))
    return mx.array(logits)


def routed(logits, routing, bias=None) -> Pairs:
    with emulator.emulated():
        return route_metal(logits, routing, bias)


def by_row(pairs: Pairs, m: int) -> list[dict[int, float]]:
    """Return each row's experts with their weights, in ascending order; check the pairs' lists."""
    tokens, weights, experts, starts, places = (np.array(a) for a in pairs)
    count = len(tokens)
    distinct = int((experts >= 0).sum())
    assert (np.diff(experts[:distinct]) > 0).all()
    assert (experts[distinct:] == -1).all()
    assert (starts[distinct:] == count).all()
    rows: list[dict[int, float]] = [{} for _ in range(m)]
    for slot in range(distinct):
        visitors = tokens[starts[slot] : starts[slot + 1]]
        assert len(visitors) > 0
        assert (np.diff(visitors) > 0).all()
        for place in range(starts[slot], starts[slot + 1]):
            rows[tokens[place]][int(experts[slot])] = weights[place]
    in_order = [sorted(row) for row in rows]
    place_expert = np.repeat(experts[:distinct], np.diff(starts[: distinct + 1]))
    assert place_expert[places].reshape(m, -1).tolist() == in_order
    assert [tokens[p] for p in places] == [row for row in range(m) for _ in range(count // m)]
    return [dict(sorted(row.items())) for row in rows]
