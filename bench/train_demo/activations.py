"""Activations and the cross entropy of the demo's training on a CPU, from the exp of `arithmetic`.

They have their own gradients.
"""

import mlx.core as mx

from .arithmetic import exp, fused, fused_exp


@fused
def _swiglu(gate: mx.array, up: mx.array) -> mx.array:
    return gate / (1 + exp(-gate)) * up


@fused
def _swiglu_gradient(gate: mx.array, up: mx.array, cotangent: mx.array) -> tuple[mx.array, mx.array]:
    s = 1 / (1 + exp(-gate))
    silu = gate * s
    return cotangent * up * (s + silu * (1 - s)), cotangent * silu


@fused
def _sigmoid(x: mx.array) -> mx.array:
    return 1 / (1 + exp(-x))


@fused
def _sigmoid_gradient(s: mx.array, cotangent: mx.array) -> mx.array:
    return cotangent * s * (1 - s)


@mx.custom_function
def sigmoid(x: mx.array) -> mx.array:
    """Return 1 / (1 + exp(-x)), elementwise."""
    return _sigmoid(x)


@sigmoid.vjp
def _sigmoid_vjp(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    return _sigmoid_gradient(output, cotangent)


@mx.custom_function
def swiglu(gate: mx.array, up: mx.array) -> mx.array:
    """Return silu(gate) * up, elementwise."""
    return _swiglu(gate, up)


@swiglu.vjp
def _swiglu_vjp(primals: tuple, cotangent: mx.array, output: mx.array) -> tuple[mx.array, mx.array]:
    return _swiglu_gradient(*primals, cotangent)


@mx.custom_function
def softmax(scores: mx.array, mask: mx.array) -> mx.array:
    """Return softmax(scores + mask) over the last axis; the mask receives no gradient.

    No maximum is subtracted; sums are clipped to [-80, 80], so -inf in the mask counts as exp(-80) instead of 0.
    """
    e = fused_exp(mx.stop_gradient(scores) + mask)
    return e / e.sum(axis=-1, keepdims=True)


@softmax.vjp
def _softmax_vjp(primals: tuple, cotangent: mx.array, output: mx.array) -> tuple[mx.array, mx.array]:
    total = (cotangent * output).sum(axis=-1, keepdims=True)
    return output * (cotangent - total), mx.zeros_like(primals[1])


@mx.custom_function
def cross_entropy(logits: mx.array, targets: mx.array) -> mx.array:
    """Return the cross entropy in nats [N] of logits [N, V] and token indices `targets` [N].

    No maximum is subtracted: the logits have to be within [-80, 80].
    """
    chosen = mx.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    return mx.log(fused_exp(logits).sum(axis=-1)) - chosen


@cross_entropy.vjp
def _cross_entropy_vjp(primals: tuple, cotangent: mx.array, output: mx.array) -> tuple[mx.array, mx.array]:
    logits, targets = map(mx.stop_gradient, primals)
    e = fused_exp(logits)
    gradient = e * (cotangent / e.sum(axis=-1))[:, None]
    gradient = gradient.at[mx.arange(len(targets)), targets].add(-cotangent)
    return gradient, mx.zeros_like(targets)
