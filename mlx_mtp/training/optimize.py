"""Make training steps with AdamW and clipped gradients."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_map

GRADIENT_NORM = 1.0
WARMUP_STEPS, DECAY = 50, 0.3


def adam() -> optimizers.Optimizer:
    """Return a new AdamW, whose rate a `Trainer` sets."""
    return optimizers.AdamW(learning_rate=0.0, betas=[0.9, 0.99], weight_decay=0.05, bias_correction=True)


class Trainer:
    """Updates of a model's trainable parameters.

    loss: receives the model and the arrays of a batch; returns (the loss, an array to report). steps: in all. peak:
    the highest rate.

    done: index of the last step that has updated the parameters, plus one; 0 before any.
    """

    def __init__(self, model: nn.Module, loss: Callable, *, steps: int, peak: float):
        self.model, self.steps, self.peak, self.done = model, steps, peak, 0
        self.optimizer = adam()
        self.gradient = nn.value_and_grad(model, loss)

    def rate(self, step: int) -> float:
        """Return the rate of step `step`, from 0: linear warmup over WARMUP_STEPS, `peak`, linear decay.

        The decay to zero takes the share DECAY of the steps; where warmup and decay overlap, the smaller rate counts.
        """
        left = (self.steps - step) / (DECAY * self.steps)
        return self.peak * min(1.0, (step + 1) / WARMUP_STEPS, left)

    def step(self, index: int, *batch: mx.array) -> mx.array:
        """Update the model in step `index`, from 0, by the arrays of a batch; return the loss's second value.

        Gradients are scaled down to the norm GRADIENT_NORM if theirs is larger.
        """
        report, gradients = self.gradients(*batch)
        gradients, _ = optimizers.clip_grad_norm(gradients, GRADIENT_NORM)
        self.optimizer.learning_rate = self.rate(index)
        self._update(index, gradients)
        mx.eval(self.model.parameters(), self.optimizer.state)
        return report

    def gradients(self, *batch: mx.array) -> tuple[mx.array, Any]:
        """Return (the array to report, the gradients) for a batch, evaluated."""
        (_, report), gradients = self.gradient(self.model, *batch)
        mx.eval(report, gradients)
        return report, gradients

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
