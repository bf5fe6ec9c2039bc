"""Compare the gradients of a training step on a tiny new head with PyTorch."""

from functools import partial

import families
import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from drafters import HEADLESS
from mlx.utils import tree_flatten

import mlx_mtp
from mlx_mtp.training import heads
from mlx_mtp.training.loss import LATER, chain_loss

torch = pytest.importorskip("torch", reason="parity with PyTorch needs mlx-mtp[parity]")

V, ROWS, LENGTH, DEPTHS = 13, 2, 12, 2
CONFIG = {**HEADLESS["qwen2"], "vocab_size": V}


class Head:
    """The new head of a tiny Qwen 2 in PyTorch: its layer reads [embedding, hidden], fused by eh_proj."""

    def __init__(self, weights: dict[str, np.ndarray], config: dict):
        self.w = {name: torch.tensor(w, requires_grad=True) for name, w in weights.items()}
        self.heads, self.kv = config["num_attention_heads"], config["num_key_value_heads"]
        self.size, self.eps = config["hidden_size"] // config["num_attention_heads"], config["rms_norm_eps"]
        self.base = config["rope_theta"]

    def norm(self, x, name):
        return x * torch.rsqrt((x**2).mean(-1, keepdim=True) + self.eps) * self.w[f"{name}.weight"]

    def linear(self, x, name):
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def turned(self, x):
        half = self.size // 2
        angles = torch.arange(x.shape[-2])[:, None] * self.base ** (-torch.arange(half) / half)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

    def __call__(self, embeddings, hidden, mask, earlier):
        x = torch.cat([self.norm(embeddings, "enorm"), self.norm(hidden, "hnorm")], -1)
        x = self.linear(x, "eh_proj")
        y = self.norm(x, "block.input_layernorm")
        parts = [
            self.linear(y, f"block.self_attn.{n}_proj").unflatten(-1, (-1, self.size)).swapaxes(1, 2) for n in "qkv"
        ]
        q, k, v = self.turned(parts[0]), self.turned(parts[1]), parts[2]
        earlier.append((k, v))
        k, v = (torch.cat(kind, 2).repeat_interleave(self.heads // self.kv, 1) for kind in zip(*earlier, strict=True))
        scores = (q @ k.transpose(-1, -2) * self.size**-0.5).masked_fill(~mask, -torch.inf)
        y = (scores.softmax(-1) @ v).swapaxes(1, 2).flatten(-2)
        x = x + self.linear(y, "block.self_attn.o_proj")
        y = self.norm(x, "block.post_attention_layernorm")
        gate = self.linear(y, "block.mlp.gate_proj")
        return x + self.linear(gate * gate.sigmoid() * self.linear(y, "block.mlp.up_proj"), "block.mlp.down_proj")


def masks(starts: np.ndarray) -> list:
    """The keys that each position attends to, by depth, from a plain loop."""
    found = []
    for depth in range(DEPTHS):
        mask = np.zeros((ROWS, 1, LENGTH, (depth + 1) * LENGTH), bool)
        for b, i in np.ndindex(ROWS, LENGTH):
            for key in range(starts[b, i], i - depth + 1):
                mask[b, 0, i, key] = True
            mask[b, 0, i, depth * LENGTH + i] = True
            for middle in range(1, depth):
                mask[b, 0, i, middle * LENGTH + i - depth + middle] = True
        found.append(torch.tensor(mask))
    return found


def theirs(head: Head, model, batch, unembedding: np.ndarray):
    """The loss of a batch in PyTorch."""
    hidden, tokens, choices, starts = (np.array(array) for array in batch[:4])
    normed = torch.tensor(np.array(model.normed(mx.array(hidden))))
    embeddings = torch.tensor(np.array(model.embed(mx.array(tokens[:, 1:]), 0)))
    rows = torch.tensor(unembedding)
    wanted = (normed[:, 1:] @ rows.T).softmax(-1)
    labels = torch.tensor(choices[:, 1:]).long()
    wanted = 0.5 * wanted + 0.5 * torch.nn.functional.one_hot(labels, V)
    state, earlier, total = normed[:, :-1], [], 0.0
    for depth, mask in enumerate(masks(starts[:, :-1])):
        output = head(embeddings, state, mask, earlier)
        output = head.norm(output, "norm")
        each = -((output @ rows.T).log_softmax(-1) * wanted).sum(-1)
        place = np.arange(LENGTH)
        used = torch.tensor((starts[:, 1:] == starts[:, :-1]) & (place - depth >= starts[:, :-1]))
        total = total + LATER**depth * (each * used).sum() / used.sum()
        state = torch.cat([torch.zeros_like(output[:, :1]), output[:, :-1]], 1)
    return total / sum(LATER**depth for depth in range(DEPTHS))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_gradients(checkpoint, tmp_path):
    model = mlx_mtp.load_model(families.headless(tmp_path, CONFIG)[0], kernels="off")
    workshop = heads.new(model, None, DEPTHS, None, mx.float32)
    rng = np.random.default_rng(0)
    shape = (ROWS, LENGTH + 1)
    starts = np.array([[0] * 13, [0] * 5 + [5] * 8], np.int32)
    tokens, choices = (mx.array(rng.integers(0, V, shape).astype(np.int32)) for _ in range(2))
    hidden = mx.array(rng.standard_normal((*shape, 32)).astype(np.float32))
    batch = (
        hidden,
        tokens,
        choices,
        mx.array(starts),
        mx.ones(shape, mx.bool_),
        mx.random.split(mx.random.key(0), ROWS),
    )
    options = {"model": model, "teacher": workshop.teacher, "ranks": workshop.ranks, "depths": DEPTHS}
    step = nn.value_and_grad(workshop.trained, partial(chain_loss, **options, checkpoint=checkpoint))
    (loss, _), gradients = step(workshop.trained, *batch)
    parameters = tree_flatten(workshop.trained.trainable_parameters())
    weights = {name.removeprefix("mtp.0."): np.array(w) for name, w in parameters}
    head = Head(weights, {**CONFIG, "rms_norm_eps": model.model.norm.eps})
    expected = theirs(head, model, batch, np.array(workshop.teacher.weight))
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    for name, gradient in tree_flatten(gradients):
        wanted = head.w[name.removeprefix("mtp.0.")].grad.numpy()
        atol = 1e-4 * np.abs(wanted).max() + 1e-7
        np.testing.assert_allclose(np.array(gradient), wanted, atol=atol, err_msg=name)
