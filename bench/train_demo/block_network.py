"""The demo's block drafter, DSpark with a recurrent Markov head: its config.json, and its loss over many anchors.

The network is the engine's own module, read through its loader; its forward is written again for training on a CPU.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_mtp.layers.block_drafter import BlockAttention, BlockNetwork
from mlx_mtp.layers.block_parts import MarkovHead
from mlx_mtp.models import dflash

from .activations import sigmoid, softmax, swiglu
from .arithmetic import imitation
from .layers import MASKED

DRAFTS, LAYERS, WINDOW, RANK = 7, 2, 32, 96
TAPS = (3, 6, 8, 10)  # numbers of the target's layers
OUTPUT_SCALE = 0.2  # of the initial weights that write to the residual stream or to the logits
LATER = 0.8  # weight of a draft's loss relative to the draft before it
NAMES = ("fc.weight", "hidden_norm.weight", "layers.0", "norm.weight", "markov_head.markov_w1.weight")


class Frozen(NamedTuple):
    """The target's embedding and LM head, [V, H], which the drafter uses, and the target's final norm."""

    embedding: mx.array
    head: mx.array
    norm: nn.RMSNorm


class Anchors(NamedTuple):
    """N stretches of L slots with A anchors each; an anchor's drafts follow the token in its slot.

    states: [N, L, taps * H]. at, since: int32 [N, A], the anchors' slots and the first slots of their documents.
    tokens: int32 [N, A, 1 + DRAFTS], the anchor's token and those to draft. weight: [N, A, DRAFTS], 0 or 1.
    """

    states: mx.array
    at: mx.array
    since: mx.array
    tokens: mx.array
    weight: mx.array


def block_config(target: dict) -> dict:
    """config.json of the drafter for a target's config.json."""
    width = target["hidden_size"]
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "vocab_size": target["vocab_size"],
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": target["max_position_embeddings"],
        "layer_types": ["sliding_attention"] * LAYERS,
        "sliding_window": WINDOW,
        "is_causal": True,
        "block_size": DRAFTS,
        "num_target_layers": target["num_hidden_layers"],
        "dflash_config": {"mask_token_id": target["pad_token_id"], "target_layer_ids": [tap - 1 for tap in TAPS]},
        "markov_head_type": "rnn",
        "markov_rank": RANK,
    }


def network(config: dict, target: dict, seed: int) -> BlockNetwork:
    """Return the drafter's module with mlx.nn's initial values from `seed`, scaled by the constants above."""
    mx.random.seed(seed)
    spec = dflash.make_spec(config, NAMES, target["num_hidden_layers"], {})
    net = dflash.make_head(spec, config, NAMES, target["hidden_size"])
    writers = [module for layer in net.layers for module in (layer.self_attn.o_proj, layer.mlp.down_proj)]
    for module in [*writers, net.markov_head.markov_w2]:
        module.weight = module.weight * OUTPUT_SCALE
    return net


def prepare(net: BlockNetwork, frozen: Frozen, states: mx.array) -> None:
    """Start from the target's norm and embedding, and with an `fc` that reads all taps [n, taps * H] at one scale."""
    width = frozen.embedding.shape[-1]
    scale = mx.rsqrt((states.reshape(len(states), -1, width) ** 2).mean(axis=(0, 2)))
    net.fc.weight = net.fc.weight * mx.repeat(scale, width)
    first = net.markov_head.markov_w1
    left, values, _ = mx.linalg.svd(frozen.embedding, stream=mx.cpu)
    rank = first.weight.shape[-1]
    principal = left[:, :rank] * values[:rank]
    first.weight = principal / mx.std(principal)
    net.norm.weight = mx.array(frozen.norm.weight)
    mx.eval(net.parameters())


def save(net: BlockNetwork, config: dict, directory: Path) -> None:
    """Write config.json and model.safetensors, in bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: value.astype(mx.bfloat16) for name, value in tree_flatten(net.parameters())}
    mx.save_safetensors(str(directory / "model.safetensors"), weights, metadata={"format": "mlx"})


def load(directory: Path, target: dict) -> BlockNetwork:
    """Return the drafter of a saved directory, in float32."""
    net = network(json.loads((directory / "config.json").read_text()), target, 0)
    weights = mx.load(str(directory / "model.safetensors"))
    net.load_weights([(name, value.astype(mx.float32)) for name, value in weights.items()])
    return net


def loss(net: BlockNetwork, frozen: Frozen, batch: Anchors) -> tuple[mx.array, mx.array]:
    """Return (loss in nats, [2, DRAFTS]: numbers of right drafts and of drafts by depth, given the tokens before).

    The drafts follow half the target's tokens, half its probabilities.
    """
    scores, drafts = logits(net, frozen, batch), batch.tokens.shape[-1] - 1
    targets, weight = batch.tokens[..., 1:], batch.weight * LATER ** mx.arange(drafts)
    flat = imitation(*(x.flatten(0, 2) for x in (scores, targets, teacher(frozen, batch))))
    hits = (mx.stop_gradient(scores).argmax(axis=-1) == targets) * batch.weight
    counts = mx.stack([hits.sum(axis=(0, 1)), batch.weight.sum(axis=(0, 1))])
    average = (flat * weight.reshape(-1)).sum() / mx.maximum(weight.sum(), 1)
    return average, mx.pad(counts, [(0, 0), (0, DRAFTS - drafts)])


def teacher(frozen: Frozen, batch: Anchors) -> mx.array:
    """Return the target's logits [N, A, b, V] for the b tokens behind each anchor, from its last layer's states."""
    N, A, tokens = batch.tokens.shape
    slots = (batch.at[..., None] + mx.arange(tokens - 1)).reshape(N, -1, 1)
    width = frozen.head.shape[-1]
    last = batch.states[..., -width:]
    rows = mx.take_along_axis(last, mx.minimum(slots, last.shape[1] - 1), axis=1)
    return (frozen.norm(rows) @ frozen.head.T).reshape(N, A, tokens - 1, -1)


def logits(net: BlockNetwork, frozen: Frozen, batch: Anchors) -> mx.array:
    """Return logits [N, A, b, V] of blocks of b drafts behind all anchors, each draft given the tokens before it."""
    N, A, tokens = batch.tokens.shape
    drafts = tokens - 1
    context = net.fused(batch.states)
    masks = mx.full((N, A, drafts - 1), net.shape.mask_token, mx.int32)
    x = frozen.embedding[mx.concatenate([batch.tokens[..., :1], masks], axis=-1)]
    mask = context_mask(batch)
    for layer in net.layers:
        x = x + attention(layer.self_attn, layer.input_layernorm(x), context, batch.at, mask, net.rope)
        y = layer.post_attention_layernorm(x)
        x = x + layer.mlp.down_proj(swiglu(layer.mlp.gate_proj(y), layer.mlp.up_proj(y)))
    rows = net.norm(x).reshape(N * A, drafts, -1)
    bias = markov(net.markov_head, batch.tokens[..., :-1].reshape(N * A, drafts), rows)
    return (rows @ frozen.head.T + bias).reshape(N, A, drafts, -1)


def context_mask(batch: Anchors) -> mx.array:
    """Return the additive mask [N, 1, A, b, L + b] of the blocks' b rows over the context and the block."""
    slots, rows = mx.arange(batch.states.shape[1]), mx.arange(batch.tokens.shape[-1] - 1)[:, None]
    at, since = batch.at[..., None, None], batch.since[..., None, None]
    context = (slots < at) & (slots >= since) & (slots > at + rows - WINDOW)
    block = mx.broadcast_to(rows >= rows.T, (*batch.at.shape, len(rows), len(rows)))
    return mx.where(mx.concatenate([context, block], axis=-1), 0.0, MASKED)[:, None]


def attention(m: BlockAttention, x: mx.array, context: mx.array, at: mx.array, mask: mx.array, rope: Any) -> mx.array:
    """Return the output [N, A, b, H] for the blocks' normed rows x, which attend to `context` [N, L, H] and blocks.

    at: the blocks' first positions [N, A]. mask: `context_mask`.
    """
    N, A, b, _ = x.shape
    D, L, position = m.head_dim, context.shape[1], at.reshape(-1)
    by_head = (N * A, b, -1, D)
    q = rope(m.q_norm(m.q_proj(x).reshape(by_head)).swapaxes(1, 2), offset=position) * m.scale
    k = rope(m.k_norm(m.k_proj(x).reshape(by_head)).swapaxes(1, 2), offset=position)
    v = m.v_proj(x).reshape(by_head).swapaxes(1, 2)
    kv, group = k.shape[1], q.shape[1] // k.shape[1]
    # The query heads of a KV head become rows of one product: [N, kv, A, group * b, D].
    q = q.reshape(N, A, kv, group * b, D).swapaxes(1, 2)
    k, v = (y.reshape(N, A, kv, b, D).swapaxes(1, 2) for y in (k, v))
    far_k = rope(m.k_norm(m.k_proj(context).reshape(N, L, kv, D)).swapaxes(1, 2))
    far_v = m.v_proj(context).reshape(N, L, kv, D).swapaxes(1, 2)
    far = (q.reshape(N, kv, -1, D) @ far_k.swapaxes(-1, -2)).reshape(*q.shape[:-1], L)
    scores = mx.concatenate([far, q @ k.swapaxes(-1, -2)], axis=-1)
    p = softmax(scores, mx.tile(mask, (1, 1, 1, group, 1)))
    out = (p[..., :L].reshape(N, kv, -1, L) @ far_v).reshape(q.shape) + p[..., L:] @ v
    out = out.reshape(N, kv, A, group, b, D).transpose(0, 2, 4, 1, 3, 5)
    return m.o_proj(out.reshape(N, A, b, -1))


def markov(head: MarkovHead, before: mx.array, rows: mx.array) -> mx.array:
    """Return the Markov head's bias [n, b, V] for output rows [n, b, H] and the tokens before them [n, b]."""
    embedded = head.markov_w1(before)
    rank = embedded.shape[-1]
    joint = head.joint_proj.weight
    given = mx.concatenate([embedded, rows], axis=-1) @ joint[:, rank:].T + head.joint_proj.bias
    state, outputs = mx.zeros_like(embedded[:, 0]), []
    for row in mx.split(given, rows.shape[1], axis=1):
        gate, candidate, output = mx.split(row[:, 0] + state @ joint[:, :rank].T, 3, axis=-1)
        gate = sigmoid(gate)
        state = gate * state + (1 - gate) * tanh(candidate)
        outputs.append(tanh(output))
    return head.markov_w2(mx.stack(outputs, axis=1))


def tanh(x: mx.array) -> mx.array:
    return 2 * sigmoid(2 * x) - 1
