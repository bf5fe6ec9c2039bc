"""Launch those of MLX's own kernels that only tests need, as `mlx_mtp.emulator.stock` launches the others."""

from pathlib import Path

import mlx.core as mx

from mlx_mtp.emulator import stock
from mlx_mtp.emulator.launch import Traffic
from mlx_mtp.emulator.options import EmulatorOptions

DOT_BLOCK = 512 * 32  # elements that one threadgroup sums


def launched(name: str, inputs, outputs, header: str, **more) -> tuple:
    """Launch the kernel of a file in `stock_metal/`, as `stock.launched` does."""
    body = (Path(__file__).parent / "stock_metal" / f"{name}.metal").read_text()
    return stock.launched(name, inputs, outputs, header, body, **more)


def sdpa_vector_2pass(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, causal: bool = False, blocks: int = 32
) -> tuple[mx.array, Traffic, Traffic]:
    """Attend from q (1, H, L, D) to k, v (1, KV, S, D) in two passes: (1, H, L, D), and the traffic of both.

    `blocks`, a multiple of 32: the number of parts of the keys. MLX uses 32 to 1024 by chip, S, L and H / KV.
    """
    (b, h, rows, _), kv = q.shape, k.shape[1]
    assert b == 1, f"{b} sequences"
    template, options, output, header = stock.attention_inputs(q, k, v, do_causal=causal, blocks=blocks)
    inputs = {"queries": q, "keys": k, "values": v, "S": k.shape[2], "scale": scale}
    dealt = b, h, rows, blocks
    parts = {"partials": ((*dealt, v.shape[-1]), q.dtype), "sums": (dealt, mx.float32), "maxs": (dealt, mx.float32)}
    more = {"groups": (kv, b, blocks), "threadgroup": (32, h // kv, rows), "template": template, "options": options}
    *found, asked = launched("sdpa_vector_2pass_1", inputs, parts, header, **more)
    inputs = {**dict(zip(parts, found, strict=True)), "BLOCKS": blocks}
    more |= {"groups": (b * h, rows, 1), "threadgroup": (1024, 1, 1), "template": template[:2]}
    y, asked_last = launched("sdpa_vector_2pass_2", inputs, output, header, **more)
    return y, asked, asked_last


def dot(x: mx.array, w: mx.array, options: EmulatorOptions | None = None) -> tuple[mx.array, Traffic]:
    """Multiply rows of x (M, K) by w (1, K): return (M, 1) and the traffic; ValueError for K above DOT_BLOCK."""
    m, k = x.shape
    if k > DOT_BLOCK:
        raise ValueError(f"x has rows of {k} values; one threadgroup sums at most {DOT_BLOCK}")
    stride = -(-k // 8) * 8  # aligns its vectors in every row
    inputs = {"x": mx.pad(x, [(0, 0), (0, stride - k)]), "w": w, "K": k, "STRIDE": stride}
    outputs, header = {"partials": ((m, 1), mx.float32)}, stock.include("utils", "dot")
    more = {"groups": (1, m, 1), "threadgroup": (512, 1, 1), "template": [("T", x.dtype)], "options": options}
    partials, traffic = launched("dot", inputs, outputs, header, **more)
    return partials.astype(x.dtype), traffic
