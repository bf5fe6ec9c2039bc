"""Step-3.5's layers as functions over mlx-lm's modules, written again for training on a CPU.

Same weights, same results as the modules' own calls; sliding attention works on blocks, all experts are
computed in one batched product (they are few), and the activations come from `activations.py`.
"""

import mlx.core as mx
from mlx_lm.models.step3p5 import Step3p5Attention, Step3p5DecoderLayer, Step3p5MLP, Step3p5MoE

from .activations import sigmoid, softmax, swiglu

MASKED = -80.0


def decoder_layer(layer: Step3p5DecoderLayer, x: mx.array) -> mx.array:
    """One decoder layer on x [B, L, H]; `layer.window` divides L, or is 0 for full attention."""
    h = x + attention(layer.self_attn, layer.input_layernorm(x), layer.window)
    y = layer.post_attention_layernorm(h)
    return h + (moe(layer.mlp, y) if layer.is_moe_layer else mlp(layer.mlp, y))


def mlp(m: Step3p5MLP, x: mx.array) -> mx.array:
    """Dense SwiGLU feed-forward on x [..., H]."""
    return m.down_proj(limited_swiglu(m.gate_proj(x), m.up_proj(x), m.limit))


def limited_swiglu(gate: mx.array, up: mx.array, limit: float | None) -> mx.array:
    """min(silu(gate), limit) * clip(up, -limit, limit); plain SwiGLU where there is no limit."""
    if limit is None:
        return swiglu(gate, up)
    return mx.minimum(gate * sigmoid(gate), limit) * mx.clip(up, -limit, limit)


def expert_weights(m: Step3p5MoE, x: mx.array) -> mx.array:
    """Expert weights [..., E] for x [..., H]: zero but for the top k of sigmoid(gate) + router_bias."""
    scores = sigmoid(m.gate.gate(x))
    ranked = mx.stop_gradient(scores + m.gate.router_bias)
    last_chosen = mx.sort(ranked, axis=-1)[..., -m.gate.top_k, None]
    chosen = scores * (ranked >= last_chosen)
    return chosen / chosen.sum(axis=-1, keepdims=True) * m.gate.routed_scaling_factor


def moe(m: Step3p5MoE, x: mx.array) -> mx.array:
    """Step3p5MoE on x [B, L, H], every expert computed for every token."""
    rows = x.reshape(1, -1, x.shape[-1])
    experts = m.switch_mlp
    gate = rows @ experts.gate_proj.weight.swapaxes(-1, -2)
    up = rows @ experts.up_proj.weight.swapaxes(-1, -2)
    y = limited_swiglu(gate, up, getattr(experts.activation, "limit", None)) @ experts.down_proj.weight.swapaxes(
        -1, -2
    )
    weights = expert_weights(m, rows[0])
    return (y * weights.T[..., None]).sum(axis=0).reshape(x.shape) + mlp(m.share_expert, x)


def causal_mask(length: int) -> mx.array:
    """Additive causal mask [L, L]."""
    return mx.where(mx.arange(length)[:, None] >= mx.arange(length)[None], 0.0, MASKED)


def window_mask(window: int, blocks: int) -> mx.array:
    """Additive mask [blocks, window, 2 * window] over the keys of the previous block and the query's own."""
    query = mx.arange(window)[:, None] + window
    key = mx.arange(2 * window)[None]
    seen = (key <= query) & (key > query - window)
    real = (mx.arange(blocks)[:, None, None] > 0) | (key >= window)
    return mx.where(seen & real, 0.0, MASKED)


def with_previous_block(x: mx.array) -> mx.array:
    """[B, h, n, size, D] -> [B, h, n, 2 * size, D]: each block behind the one before, or zeros."""
    before = mx.concatenate([mx.zeros_like(x[:, :, :1]), x[:, :, :-1]], axis=2)
    return mx.concatenate([before, x], axis=3)


def attention(m: Step3p5Attention, x: mx.array, window: int) -> mx.array:
    """Gated self-attention on x [B, L, H], in L / window blocks of queries (one block when window is 0)."""
    B, L, _ = x.shape
    heads, kv_heads, D = m.num_heads, m.num_kv_heads, m.head_dim
    G, size = heads // kv_heads, window or L
    n = L // size
    q = m.rope(m.q_norm(m.q_proj(x).reshape(B, L, heads, D)).swapaxes(1, 2)) * m.scale
    k = m.rope(m.k_norm(m.k_proj(x).reshape(B, L, kv_heads, D)).swapaxes(1, 2))
    v = m.v_proj(x).reshape(B, L, kv_heads, D).swapaxes(1, 2)
    # The G query heads of a kv head become rows of one product: [B, kv_heads, n, G * size, D].
    q = q.reshape(B, kv_heads, G, n, size, D).swapaxes(2, 3).reshape(B, kv_heads, n, G * size, D)
    k, v = k.reshape(B, kv_heads, n, size, D), v.reshape(B, kv_heads, n, size, D)
    if window:
        k, v = with_previous_block(k), with_previous_block(v)
    mask = window_mask(window, n) if window else causal_mask(L)[None]
    out = softmax(q @ k.swapaxes(-1, -2), mx.tile(mask, (1, G, 1))) @ v
    out = out.reshape(B, kv_heads, n, G, size, D).transpose(0, 2, 4, 1, 3, 5).reshape(B, L, heads, D)
    return m.o_proj((out * sigmoid(m.g_proj(x))[..., None]).reshape(B, L, heads * D))
