"""Make training steps with AdamW and clipped gradients; on a CPU on several streams."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_map

from .streams import STREAMS, streams

GRADIENT_NORM = 1.0
WARMUP_STEPS, DECAY = 50, 0.3


def trapezoid(step: int, steps: int, peak: float) -> float:
    """Return the rate of step `step` (from 0) of `steps`: linear warmup over WARMUP_STEPS, `peak`, linear decay.

    The decay to zero takes the share DECAY of the steps; where warmup and decay overlap, the smaller rate counts.
    """
    left = (steps - step) / (DECAY * steps)
    return peak * min(1.0, (step + 1) / WARMUP_STEPS, left)


def adam() -> optimizers.Optimizer:
    """Return a new AdamW, whose rate a `Trainer` sets."""
    return optimizers.AdamW(learning_rate=0.0, betas=[0.9, 0.99], weight_decay=0.05, bias_correction=True)


class Trainer:
    """Updates of a model's trainable parameters.

    loss: receives the model and the arrays of a batch; returns (the loss, an array to report). steps: in all. peak:
    the highest rate. optimizer: a new one; None for AdamW. count: number of streams on a CPU, which divides the
    number of rows of every batch. schedule: (step, steps, peak) -> rate.

    done: index of the last step that has updated the parameters, plus one; 0 before any.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable,
        *,
        steps: int,
        peak: float,
        optimizer: optimizers.Optimizer | None = None,
        count: int = STREAMS,
        schedule: Callable[[int, int, float], float] = trapezoid,
    ):
        self.model, self.steps, self.peak, self.schedule, self.done = model, steps, peak, schedule, 0
        self.optimizer = optimizer or adam()
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
        self.optimizer.learning_rate = self.schedule(index, self.steps, self.peak)
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
