"""Compare bits, create seeded quantized weights, and run MLX's own one-row kernel."""

from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_mtp import emulator
from mlx_mtp.emulator import stock
from mlx_mtp.kernels import Quantized

AFFINE = [("affine", bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
FORMATS = [*AFFINE, ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
CONTRACTIONS = ("off", "on", "fast")
DOT_BLOCK = 512 * 32  # elements that one threadgroup of MLX's `dot` sums
# The kernel that mx.compile creates for nn.silu, mx.clip and a product: MLX's operations, each rounded to T.
ACTIVATION = """
    uint i = thread_position_in_grid.x;
    T rate = Sigmoid()(gate[i]);
    T open = Multiply()(gate[i], rate), linear = up[i];
    if (CLAMPED) {
        open = Minimum()(open, limit[0]);
        linear = Minimum()(Maximum()(linear, Negative()(limit[0])), limit[0]);
    }
    y[i] = Multiply()(open, linear);
"""


def bits_of(x: mx.array) -> np.ndarray:
    return np.array(x.view(mx.uint32 if x.dtype == mx.float32 else mx.uint16))


def same_bits(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and np.array_equal(bits_of(a), bits_of(b))


def draw(mode: str, bits: int, group: int, shape: tuple[int, int], m: int, dtype: mx.Dtype, parts=()):
    """Return x (m, K) and weights of shape (N, K), equal for equal arguments; `parts`: the end of each linear."""
    mx.random.seed(m * shape[0] + shape[1] + bits)
    w, scales, *biases = mx.quantize(mx.random.normal(shape).astype(dtype), group, bits, mode=mode)
    ends = tuple(parts) or (shape[0],)
    weights = Quantized(w, scales, biases[0] if biases else None, group, bits, mode, ends)
    return mx.random.normal((m, shape[1])).astype(dtype), weights


def one_row(x: mx.array, weights: Quantized, options: emulator.Options | None = None) -> mx.array:
    """Return (M, N): MLX's own one-row kernel, from the wheel's headers, applied to each row."""
    n, name = weights.w.shape[0], stock.chosen(weights.k, weights.w.shape[0], weights.bits)
    arrays = [a for a in (weights.w, weights.scales, weights.biases) if a is not None]
    if name == "qmv_quad":  # it reads scales past the last row unless N is a multiple of 64
        arrays = [mx.concatenate([a, mx.repeat(a[:1], -n % 64, axis=0)]) for a in arrays]
    format_ = {"group_size": weights.group_size, "bits": weights.bits}
    return stock.quantized_matvec(x, *arrays, **format_, kernel=name, options=options)[0][:, :n]


def activation(gate: mx.array, up: mx.array, limit: float | None, options: emulator.Options) -> mx.array:
    """Return SwiGLU of two products, in a launch of its own."""
    header = stock.include("utils", "unary_ops", "binary_ops")
    kernel = emulator.metal_kernel("activation", ["gate", "up", "limit"], ["y"], ACTIVATION, header=header)
    (y,) = kernel(
        inputs=[gate, up, mx.array([limit or 0.0], gate.dtype)],
        template=[("T", gate.dtype), ("CLAMPED", limit is not None)],
        grid=(gate.size, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[gate.shape],
        output_dtypes=[gate.dtype],
        options=options,
    )
    return y


def body(name: str) -> str:
    """Return the body of a kernel that calls MLX's function of this name."""
    return Path(__file__).with_name(f"{name}.metal").read_text()


def dot(x: mx.array, w: mx.array, options: emulator.Options | None = None) -> tuple[mx.array, emulator.Traffic]:
    """Multiply rows of x (M, K) by w (1, K) with MLX's `dot`: return (M, 1) and the traffic.

    ValueError for K above DOT_BLOCK.
    """
    m, k = x.shape
    if k > DOT_BLOCK:
        raise ValueError(f"x has rows of {k} values; one threadgroup sums at most {DOT_BLOCK}")
    stride = -(-k // 8) * 8  # aligns its vectors in every row
    inputs = {"x": mx.pad(x, [(0, 0), (0, stride - k)]), "w": w, "K": k, "STRIDE": stride}
    outputs, header = {"partials": ((m, 1), mx.float32)}, stock.include("utils", "dot")
    more = {"groups": (1, m, 1), "threadgroup": (512, 1, 1), "template": [("T", x.dtype)], "options": options}
    partials, traffic = stock.launched("dot", inputs, outputs, header, body("dot"), **more)
    return partials.astype(x.dtype), traffic


def sdpa_vector_2pass(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, causal: bool = False, blocks: int = 32
) -> tuple[mx.array, emulator.Traffic, emulator.Traffic]:
    """Attend from q (1, H, L, D) to k, v (1, KV, S, D) in two passes: (1, H, L, D), and the traffic of both.

    `blocks`, a multiple of 32: the number of parts of the keys. MLX uses 32 to 1024 by chip, S, L and H / KV.
    """
    (b, h, rows, _), kv = q.shape, k.shape[1]
    assert b == 1, f"{b} sequences"
    template, options, output, header = stock.attention_launch(q, k, v, do_causal=causal, blocks=blocks)
    inputs = {"queries": q, "keys": k, "values": v, "S": k.shape[2], "scale": scale}
    dealt = b, h, rows, blocks
    parts = {"partials": ((*dealt, v.shape[-1]), q.dtype), "sums": (dealt, mx.float32), "maxs": (dealt, mx.float32)}
    more = {"groups": (kv, b, blocks), "threadgroup": (32, h // kv, rows), "template": template, "options": options}
    *found, asked = stock.launched("sdpa_vector_2pass_1", inputs, parts, header, body("sdpa_vector_2pass_1"), **more)
    inputs = {**dict(zip(parts, found, strict=True)), "BLOCKS": blocks}
    more |= {"groups": (b * h, rows, 1), "threadgroup": (1024, 1, 1), "template": template[:2]}
    y, asked_last = stock.launched("sdpa_vector_2pass_2", inputs, output, header, body("sdpa_vector_2pass_2"), **more)
    return y, asked, asked_last
