"""Make a training step: clipped AdamW, or Muon for matrices; data parallel over CPU streams."""

import math
from collections.abc import Callable
from contextlib import nullcontext

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_map

STREAMS = 2  # one per core: MLX's CPU runs everything but BLAS on one thread
GRADIENT_NORM = 1.0
RESTART_STEPS = 30
MUON_RATE = 8
WARMUP_STEPS, DECAY = 50, 0.3


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warmup over 4% of the steps, then a cosine down to 2% of the peak."""
    warmup = max(1, steps // 25)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def trapezoid(step: int, steps: int, peak: float) -> float:
    """Linear warmup over WARMUP_STEPS, the peak, and a linear decay to zero over the last DECAY of the steps."""
    left = (steps - step) / (DECAY * steps)
    return peak * min(1.0, (step + 1) / WARMUP_STEPS, left)


class MuonAndAdam(optimizers.MultiOptimizer):
    """Muon for the matrices among the parameters, at MUON_RATE times the learning rate of Adam for the rest."""

    def __init__(self, adam: optimizers.Optimizer, is_matrix: Callable[[str, mx.array], bool]):
        super().__init__([optimizers.Muon(learning_rate=0.0, weight_decay=0.0), adam], [is_matrix])

    @property
    def learning_rate(self) -> mx.array:
        return self.optimizers[1].learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self.optimizers[0].learning_rate, self.optimizers[1].learning_rate = MUON_RATE * rate, rate


class Trainer:
    """Model, loss, optimizer and streams of one phase; in a later phase the fresh optimizer warms up again.

    is_matrix: whether Muon updates the parameter of a path; AdamW updates the others, by default all. streams: on a
    CPU; the number of rows of every batch is a multiple of this.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable,
        *,
        first: int,
        steps: int,
        peak: float,
        is_matrix: Callable[[str, mx.array], bool] | None = None,
        streams: int = STREAMS,
        schedule: Callable[[int, int, float], float] = learning_rate,
    ):
        self.model, self.first, self.steps, self.peak, self.schedule = model, first, steps, peak, schedule
        adam = optimizers.AdamW(learning_rate=0.0, betas=[0.9, 0.99], weight_decay=0.05, bias_correction=True)
        self.optimizer = MuonAndAdam(adam, is_matrix) if is_matrix else adam
        device = mx.default_device()
        self.streams = [mx.new_stream(device) for _ in range(streams)] if device == mx.cpu else [None]
        self.gradient = nn.value_and_grad(model, loss)

    def step(self, index: int, *batch: mx.array) -> mx.array:
        """One update on arrays of B rows, a part on each stream; returns the mean of the loss's second value."""
        shares = []
        count = len(self.streams)
        for stream, *rows in zip(self.streams, *(mx.split(array, count) for array in batch), strict=True):
            with mx.stream(stream) if stream else nullcontext():
                shares.append(self.gradient(self.model, *rows))
        mx.eval(shares)
        gradients = tree_map(lambda *g: sum(g) / count, *(g for _, g in shares))
        gradients, _ = optimizers.clip_grad_norm(gradients, GRADIENT_NORM)
        restart = min(1.0, (index - self.first + 1) / RESTART_STEPS) if self.first else 1.0
        self.optimizer.learning_rate = restart * self.schedule(index, self.steps, self.peak)
        self.optimizer.update(self.model, gradients)
        mx.eval(self.model.parameters(), self.optimizer.state)
        return mx.stack([report for (_, report), _ in shares]).mean(axis=0)
