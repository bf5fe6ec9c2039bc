"""Make training steps with AdamW, or Muon for matrices, and clipped gradients; on a CPU on several streams."""

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_map

from .streams import STREAMS, streams

GRADIENT_NORM = 1.0
RESTART_STEPS = 30
MUON_RATE = 8
WARMUP_STEPS, DECAY = 50, 0.3


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the rate of step `step` (from 0) of `steps`: linear warmup over 4% of them, then a cosine.

    The warmup has at least one step. The cosine falls from `peak` towards 2% of it.
    """
    warmup = max(1, steps // 25)
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


def trapezoid(step: int, steps: int, peak: float) -> float:
    """Return the rate of step `step` (from 0) of `steps`: linear warmup over WARMUP_STEPS, `peak`, linear decay.

    The decay to zero takes the share DECAY of the steps; where warmup and decay overlap, the smaller rate counts.
    """
    left = (steps - step) / (DECAY * steps)
    return peak * min(1.0, (step + 1) / WARMUP_STEPS, left)


class MuonAndAdam(optimizers.MultiOptimizer):
    """An optimizer: Muon for the parameters for which `is_matrix` returns True, `adam` for the others.

    is_matrix: receives a parameter's path and the parameter. `learning_rate` is that of `adam`; Muon's is MUON_RATE
    times as large.
    """

    def __init__(self, adam: optimizers.Optimizer, is_matrix: Callable[[str, mx.array], bool]):
        super().__init__([optimizers.Muon(learning_rate=0.0, weight_decay=0.0), adam], [is_matrix])

    @property
    def learning_rate(self) -> mx.array:
        return self.optimizers[1].learning_rate

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        self.optimizers[0].learning_rate, self.optimizers[1].learning_rate = MUON_RATE * rate, rate


class Trainer:
    """Updates of a model's trainable parameters, by a new optimizer, for the steps from `first` on.

    loss: receives the model and the arrays of a batch; returns (the loss, an array to report). first: if not 0, the
    rate rises linearly to that of the schedule over RESTART_STEPS. steps: in all. peak: the highest rate. is_matrix:
    whether Muon updates a parameter, by its path and itself; None: AdamW updates all. count: number of streams on a
    CPU, which divides the number of rows of every batch. schedule: (step, steps, peak) -> rate.

    done: index of the last step that has updated the parameters, plus one; `first` before any.
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
        count: int = STREAMS,
        schedule: Callable[[int, int, float], float] = learning_rate,
    ):
        self.model, self.first, self.steps, self.peak, self.schedule = model, first, steps, peak, schedule
        self.done = first
        adam = optimizers.AdamW(learning_rate=0.0, betas=[0.9, 0.99], weight_decay=0.05, bias_correction=True)
        self.optimizer = MuonAndAdam(adam, is_matrix) if is_matrix else adam
        self.streams = streams(count)
        self.gradient = nn.value_and_grad(model, loss)

    def step(self, index: int, *batch: mx.array) -> mx.array:
        """Update the model in step `index`, from 0; return the mean of the loss's second value over the streams.

        batch: arrays of B rows, of which each stream computes an equal part. Gradients are averaged, and scaled down
        to the norm GRADIENT_NORM if theirs is larger.
        """
        shares = self.shares(*batch)
        gradients = tree_map(lambda *g: sum(g) / len(shares), *(g for _, g in shares))
        gradients, _ = optimizers.clip_grad_norm(gradients, GRADIENT_NORM)
        restart = min(1.0, (index - self.first + 1) / RESTART_STEPS) if self.first else 1.0
        self.optimizer.learning_rate = restart * self.schedule(index, self.steps, self.peak)
        self._update(index, gradients)
        mx.eval(self.model.parameters(), self.optimizer.state)
        return mx.stack([report for (_, report), _ in shares]).mean(axis=0)

    def shares(self, *batch: mx.array) -> list[Any]:
        """Return each stream's ((loss, array to report), gradients) of its part of the rows, evaluated."""
        found, count = [], len(self.streams)
        for stream, *rows in zip(self.streams, *(mx.split(array, count) for array in batch), strict=True):
            with stream:
                found.append(self.gradient(self.model, *rows))
        mx.eval(found)
        return found

    def _update(self, index: int, gradients: dict) -> None:
        """Set parameters, optimizer and `done` to those after step `index`, not yet evaluated.

        An exception, such as a KeyboardInterrupt, leaves them as after the step before.
        """
        before = self.model.trainable_parameters(), tree_map(lambda array: array, self.optimizer.state)
        try:
            self.optimizer.update(self.model, gradients)
            self.done = index + 1
        except BaseException:
            self.model.update(before[0])
            self.optimizer.state, self.done = before[1], index
            raise
