"""The training step: data parallel over CPU streams, clipped AdamW, a balanced router."""

import math
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_map

from .network import DemoModel, router_choices

STREAMS = 2  # one per core: MLX's CPU runs everything but BLAS on one thread
GRADIENT_NORM = 1.0
RESTART_STEPS = 30


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warmup over 4% of the steps, then a cosine down to 2% of the peak."""
    warmup = max(1, steps // 25)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


class Trainer:
    """Model, loss, optimizer and streams of one phase; in a later phase the fresh optimizer warms up again."""

    def __init__(self, model: DemoModel, loss: Callable, *, first: int, steps: int, peak: float):
        self.model, self.first, self.steps, self.peak = model, first, steps, peak
        self.adam = optimizers.AdamW(learning_rate=0.0, betas=[0.9, 0.99], weight_decay=0.05, bias_correction=True)
        for layer in model.model.layers:
            if layer.is_moe_layer:
                layer.mlp.gate.freeze(keys=["router_bias"], recurse=False)
        self.streams = [mx.new_stream(mx.cpu) for _ in range(STREAMS)]
        self.gradient = nn.value_and_grad(model, loss)

    def step(self, index: int, tokens: mx.array) -> mx.array:
        """One update on tokens [B, L + depths + 1]; returns the mean losses [1 + depths] before it."""
        shares = []
        for stream, rows in zip(self.streams, mx.split(tokens, STREAMS), strict=True):
            with mx.stream(stream):
                shares.append(self.gradient(self.model, rows))
        mx.eval(shares)
        gradients = tree_map(lambda *g: sum(g) / STREAMS, *(g for _, g in shares))
        gradients, _ = optimizers.clip_grad_norm(gradients, GRADIENT_NORM)
        restart = min(1.0, (index - self.first + 1) / RESTART_STEPS) if self.first else 1.0
        self.adam.learning_rate = restart * learning_rate(index, self.steps, self.peak)
        self.adam.update(self.model, gradients)
        mx.eval(self.model.parameters(), self.adam.state)
        if index % 10 == 0:
            balance_router(self.model, tokens[:2, : -len(self.model.mtp) - 1], rate=0.01)
        return sum(losses for (_, losses), _ in shares) / STREAMS


def balance_router(model: DemoModel, tokens: mx.array, rate: float) -> None:
    """Move each router bias by `rate` towards equal use of the experts on tokens [B, L]."""
    for gate, weights in router_choices(model, tokens):
        load = (weights > 0).astype(mx.float32).mean(axis=0)
        gate.router_bias = gate.router_bias + rate * mx.sign(load.mean() - load)
    mx.eval(model.parameters())
