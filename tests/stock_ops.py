"""What runs beside the kernels in a whole model, in the place of Metal: MLX's own, one row at a time.

A CPU's products and exponentials have other bits than a GPU's, and its attention depends on the number of rows.
"""

from contextlib import ExitStack, contextmanager
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
from exact import one_row

from mlx_mtp import emulator, kernels
from mlx_mtp.emulator import stock
from mlx_mtp.kernels import Quantized

SILU = "uint i = thread_position_in_grid.x; T rate = Sigmoid()(x[i]); y[i] = Multiply()(x[i], rate);"


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
        masks = [None if mask is None else mask[..., i : i + 1, :] for i in range(count)]
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


def silu(x):
    header = stock.include("utils", "unary_ops", "binary_ops")
    kernel = emulator.metal_kernel("silu", ["x"], ["y"], SILU, header=header)
    grid, group = (x.size, 1, 1), (min(x.size, 32), 1, 1)
    (y,) = kernel(
        inputs=[x],
        template=[("T", x.dtype)],
        grid=grid,
        threadgroup=group,
        output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )
    return y


def rms_norm(x, weight, eps):
    """MLX's kernel is not in its wheel: ours, which repeats its order of sums, stands for it, on one row at a time."""
    weight = mx.ones(x.shape[-1:], x.dtype) if weight is None else weight
    return kernels.add_norm(x, mx.zeros_like(x), weight, eps)[1]


def rope(x, dims, *, traditional, base, scale, offset, freqs=None):
    q = x.swapaxes(1, 2)
    return kernels.norm_rope(q, q, offset, kernels.Rope(dims, traditional, base, freqs, scale))[0]


@contextmanager
def stock_ops():
    """Inside, what is no kernel of ours computes as MLX does on a GPU, or row by row."""
    sdpa = mx.fast.scaled_dot_product_attention
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(mx, "quantized_matmul", quantized_matmul))
        stack.enter_context(mock.patch.object(mx, "conv1d", conv1d))
        stack.enter_context(mock.patch.object(mx.fast, "scaled_dot_product_attention", attention(sdpa)))
        stack.enter_context(mock.patch.object(nn, "silu", silu))
        stack.enter_context(mock.patch.object(mx.fast, "rms_norm", rms_norm))
        stack.enter_context(mock.patch.object(mx.fast, "rope", rope))
        yield
