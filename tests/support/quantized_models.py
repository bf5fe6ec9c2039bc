"""Make tiny 4-bit checkpoints in which every module has a kernel."""

import families
import mlx.core as mx
import tiny
from qwen import QWEN_TEXT

STEP = {
    **{"hidden_size": 64, "head_dim": 32, "intermediate_size": 96, "moe_intermediate_size": 32},
    **{"share_expert_dim": 64, "swiglu_limits_shared": [0, 0, 0, 0.5]},
}
HYBRID = {
    **QWEN_TEXT,
    "intermediate_size": 64,
    "head_dim": 32,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
}


def quantized(weights: dict, dtype=mx.bfloat16) -> dict:
    """Return a checkpoint's tensors with 4-bit matrices; others have type `dtype`."""
    found = {}
    for name, w in weights.items():
        matrix = name.endswith("weight") and w.ndim > 1 and w.shape[-1] % 32 == 0 and "conv1d" not in name
        if matrix:
            stem = name.removesuffix("weight")
            parts = mx.quantize(w, 32, 4)
            found |= {f"{stem}{part}": a for part, a in zip(("weight", "scales", "biases"), parts, strict=True)}
            found |= {f"{stem}{part}": found[f"{stem}{part}"].astype(dtype) for part in ("scales", "biases")}
        else:
            found[name] = w.astype(dtype)
    return found


def save_checkpoints(path, dtype=mx.bfloat16) -> dict:
    """Write both checkpoints, and return their directories by name."""
    quantization = {"quantization": {"group_size": 32, "bits": 4}}
    step = {**tiny.CONFIG, **STEP, "vocab_size": 16}
    paths = {name: path / name for name in ("step", "hybrid")}
    tiny.save(paths["step"], step | quantization, quantized(tiny.random_weights(step), dtype))
    hybrid = families.FAMILIES["qwen3_5"].config | {"text_config": HYBRID}
    _, weights, _ = families.build("qwen3_5", paths["hybrid"], **hybrid)
    tiny.save(paths["hybrid"], hybrid | quantization, quantized(weights, dtype))
    return paths
