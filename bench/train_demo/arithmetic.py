"""Replace arithmetic for training on a CPU, where MLX takes 12 ns for one exp: here exp is products, which vectorise.

The relative error of exp is below 2e-5 on [-80, 80]. `imitation` has its own gradient. MLX compiles no function whose
gradient is traced, so the compiled functions here receive inputs without gradients.
"""

from collections.abc import Callable
from functools import wraps

import mlx.core as mx

SQUARINGS = 8
TAYLOR = (1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720)


def fused(function: Callable) -> Callable:
    """Return `function`, compiled even while a gradient is traced; the gradient of its result is zero.

    It is compiled once for each stream, because a compiled graph stays on the stream where it was traced.
    """
    compiled = {}

    @wraps(function)
    def call(*inputs: mx.array):
        stream = str(mx.default_stream(mx.default_device()))
        if stream not in compiled:
            compiled[stream] = mx.compile(lambda *xs: function(*xs))
        return compiled[stream](*map(mx.stop_gradient, inputs))

    return call


def exp(x: mx.array) -> mx.array:
    """Return exp(x) as t ** 256, where t is the Taylor series of exp(x / 256); x is clipped to [-80, 80]."""
    x = mx.clip(x, -80, 80) * (0.5**SQUARINGS)
    p = TAYLOR[-1] * x
    for c in reversed(TAYLOR[:-1]):
        p = (p + c) * x
    p = (p + 1) * x + 1
    for _ in range(SQUARINGS):
        p = p * p
    return p


fused_exp = fused(exp)


@mx.custom_function
def imitation(logits: mx.array, targets: mx.array, teacher: mx.array) -> mx.array:
    """Return the cross entropy in nats [N] of logits [N, V] and the probabilities of `_mixed`.

    targets: token indices [N]. teacher: logits [N, V]. No maximum is subtracted, and exp clips its inputs to
    [-80, 80]: the maximum of each row of both logits should be near 0. Only `logits` receives a gradient.
    """
    return mx.log(fused_exp(logits).sum(axis=-1)) - (logits * _mixed(targets, teacher)).sum(axis=-1)


@imitation.vjp
def _imitation_vjp(primals: tuple, cotangent: mx.array, output: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    logits, targets, teacher = map(mx.stop_gradient, primals)
    e = fused_exp(logits)
    gradient = e * (cotangent / e.sum(axis=-1))[:, None] - cotangent[:, None] * _mixed(targets, teacher)
    return gradient, mx.zeros_like(targets), mx.zeros_like(teacher)


def _mixed(targets: mx.array, teacher: mx.array) -> mx.array:
    """Return probabilities [N, V]: half of softmax(teacher), plus 0.5 at the index in `targets` of each row."""
    e = fused_exp(teacher)
    return (e * (0.5 / e.sum(axis=-1, keepdims=True))).at[mx.arange(len(targets)), targets].add(0.5)
