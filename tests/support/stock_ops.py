"""Replace MLX's operations in a whole model by Metal's arithmetic, one row at a time, in addition to our kernels.

A CPU's products and exponentials have other bits than a GPU's, and its attention depends on the number of rows.
"""

from contextlib import ExitStack, contextmanager
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from exact import one_row
from metal_cases import launch
from mlx_lm.models import gated_delta, qwen3_next

from mlx_mtp import kernels
from mlx_mtp.emulator import stock
from mlx_mtp.kernels import Quantized
from mlx_mtp.layers import gated_delta as delta_layers

# The kernels that mx.compile creates for elementwise functions of a, b and c: MLX's operators, each rounded to its
# type. They are one kernel here, so that only one is compiled.
ELEMENTWISE = """
    uint i = thread_position_in_grid.x;
    if (d[0] == SIGMOID) {
        out[i] = Sigmoid()(static_cast<T>(a[i]));
    } else if (d[0] == SILU) {
        T x = static_cast<T>(a[i]), rate = Sigmoid()(x);
        T product = Multiply()(x, rate);
        out[i] = product;
    } else if (d[0] == DECAY) {
        T step = Add()(static_cast<T>(b[i]), static_cast<T>(c[i]));
        T soft = LogAddExp()(step, T(0));
        float rate = Negative()(Exp()(static_cast<float>(a[i])));
        float exponent = Multiply()(rate, static_cast<float>(soft));
        out[i] = Exp()(exponent);
    } else {
        float gate = static_cast<float>(a[i]);
        float open = Multiply()(gate, Sigmoid()(gate));
        float product = Multiply()(open, static_cast<float>(b[i]));
        out[i] = static_cast<T>(product);
    }
"""
CODES = {"SIGMOID": 0, "SILU": 1, "DECAY": 2, "SWIGLU": 3}


def quantized_matmul(x, w, scales, biases=None, transpose=True, group_size=64, bits=4, mode="affine"):
    assert transpose
    if w.ndim == 3:  # a matrix per head, x [1, heads, L, K]
        parts = [(w, scales) if biases is None else (w, scales, biases)]
        heads = zip(x[0], *parts[0], strict=True)
        format_ = {"group_size": group_size, "bits": bits, "mode": mode}
        return mx.stack([quantized_matmul(*of_head, **format_) for of_head in heads])[None]
    weights = Quantized(w, scales, biases, group_size, bits, mode, (w.shape[0],))
    return one_row(x.reshape(-1, x.shape[-1]), weights).reshape(*x.shape[:-1], -1)


def attention(sdpa):
    def rows_singly(q, k, v, *, scale, mask=None, **more):
        count = q.shape[2]
        if count == 1:
            return sdpa(q, k, v, scale=scale, mask=mask, **more)
        if mask == "causal":
            mask = mx.tril(mx.ones((count, k.shape[2]), mx.bool_), k.shape[2] - count)
        same = mask is None or mask.shape[-2] == 1
        masks = [mask if same else mask[..., i : i + 1, :] for i in range(count)]
        rows = [sdpa(q[:, :, i : i + 1], k, v, scale=scale, mask=m, **more) for i, m in enumerate(masks)]
        return mx.concatenate(rows, axis=2)

    return rows_singly


def conv1d(x, w, stride=1, padding=0, dilation=1, groups=1):
    """MLX's depthwise kernel: taps in order, summed in float."""
    assert (stride, padding, dilation, groups) == (1, 0, 1, x.shape[2])
    taps, sums = w.shape[1], mx.zeros((1, x.shape[1] - w.shape[1] + 1, x.shape[2]))
    for i in range(taps):
        sums = sums + x[:, i : i + sums.shape[1]].astype(mx.float32) * w[:, i, 0].astype(mx.float32)
    return sums.astype(x.dtype)


def elementwise(name, *arrays, dtype, T, options=None):
    """Return one of CODES on one to three arrays of one shape, with T for the type that MLX computes in."""
    header = stock.include("utils", "unary_ops", "binary_ops")
    template = [("T", T), *CODES.items()]
    found = launch(
        ELEMENTWISE, *(arrays * 3)[:3], mx.array([CODES[name]]), header=header, template=template, options=options
    )
    return found.astype(dtype)


def silu(x, options=None):
    return elementwise("SILU", x, dtype=x.dtype, T=x.dtype, options=options)


def sigmoid(x, options=None):
    return elementwise("SIGMOID", x, dtype=x.dtype, T=x.dtype, options=options)


def compute_g(A_log, a, dt_bias, options=None):
    arrays = mx.broadcast_arrays(A_log, a, dt_bias)
    return elementwise("DECAY", *arrays, dtype=mx.float32, T=mx.result_type(a, dt_bias), options=options)


def precise_swiglu(h, gate, x, options=None):
    return elementwise("SWIGLU", gate, x, dtype=h.dtype, T=h.dtype, options=options)


def rms_norm(x, weight, eps):
    """Our kernel, which has MLX's order of sums: MLX's own is not in its wheel."""
    weight = mx.ones(x.shape[-1:], x.dtype) if weight is None else weight
    return kernels.add_norm(x, mx.zeros_like(x), weight, eps)[1]


def rope(x, dims, *, traditional, base, scale, offset, freqs=None):
    q = x.swapaxes(1, 2)
    return kernels.norm_rope(q, q, offset, kernels.RopeArguments(dims, traditional, base, freqs, scale))[0]


@contextmanager
def stock_ops():
    """Inside, operations without a kernel of ours compute as MLX does on a GPU, or row by row."""
    sdpa = mx.fast.scaled_dot_product_attention
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(mx, "quantized_matmul", quantized_matmul))
        stack.enter_context(mock.patch.object(mx, "conv1d", conv1d))
        stack.enter_context(mock.patch.object(mx.fast, "scaled_dot_product_attention", attention(sdpa)))
        stack.enter_context(mock.patch.object(nn, "silu", silu))
        stack.enter_context(mock.patch.object(mx, "sigmoid", sigmoid))
        stack.enter_context(mock.patch.object(mx.fast, "rms_norm", rms_norm))
        stack.enter_context(mock.patch.object(gated_delta, "compute_g", compute_g))
        stack.enter_context(mock.patch.object(delta_layers, "compute_g", compute_g))
        stack.enter_context(mock.patch.object(qwen3_next, "precise_swiglu", precise_swiglu))
        stack.enter_context(mock.patch.object(mx.fast, "rope", rope))
        yield
