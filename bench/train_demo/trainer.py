"""Make training steps on several streams of a CPU."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optimizers
from mlx.utils import tree_map

from mlx_mtp.training import optimize

from .streams import STREAMS, streams


class Trainer(optimize.Trainer):
    """The `Trainer` of the package, with each stream computing an equal part of the rows of a batch.

    optimizer: a new one; None for AdamW. count: number of streams, which divides the number of rows of every batch.
    schedule: (step, steps, peak) -> rate; None for the package's.
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
        schedule: Callable[[int, int, float], float] | None = None,
    ):
        super().__init__(model, loss, steps=steps, peak=peak)
        self.optimizer, self.schedule = optimizer or self.optimizer, schedule
        self.streams = streams(count)

    def rate(self, step: int) -> float:
        return self.schedule(step, self.steps, self.peak) if self.schedule else super().rate(step)

    def gradients(self, *batch: mx.array) -> tuple[mx.array, Any]:
        """Return (the mean of the arrays to report, the mean of the gradients) over the streams."""
        found, count = [], len(self.streams)
        for stream, *rows in zip(self.streams, *(mx.split(array, count) for array in batch), strict=True):
            with stream:
                found.append(self.gradient(self.model, *rows))
        mx.eval(found)
        gradients = tree_map(lambda *g: sum(g) / count, *(g for _, g in found))
        return mx.stack([report for (_, report), _ in found]).mean(axis=0), gradients
