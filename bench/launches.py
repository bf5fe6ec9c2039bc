"""How many operations a layer's verify of four rows is, before and after the kernels: counted in recorded graphs.

    python bench/launches.py

An operation is a launch or more on a GPU. Views are not counted; elementwise operations count singly, though
mx.compile fuses some (SwiGLU, gates, routing weights); MLX's fused norms, RoPE and attention count one each.
Layers of the families in tiny widths, quantized to 4 bits; nothing is computed, no GPU is needed.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import click
import mlx.core as mx
import mlx.nn as nn
from rich.console import Console
from rich.table import Table

with mock.patch.object(mx.metal, "is_available", return_value=True):
    from mlx_lm.models import gated_delta  # noqa: F401 makes its kernels when it is imported

from mlx_lm.models import glm4_moe

from mlx_mtp import switch
from mlx_mtp.models import glm4_moe as glm_port
from mlx_mtp.models import qwen3_5 as qwen_port
from mlx_mtp.models import step3p5 as step_port
from mlx_mtp.prompt_cache import make_prompt_cache

ROWS = 4
VIEWS = {
    "Broadcast",
    "ExpandDims",
    "Flatten",
    "Full",
    "Reshape",
    "Slice",
    "Split",
    "Squeeze",
    "Transpose",
    "Unflatten",
}
STEP = step_port.ModelArgs(
    **{"model_type": "step3p5", "hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_attention_groups": 2, "head_dim": 32, "intermediate_size": 128},
    **{"moe_num_experts": 8, "moe_top_k": 2, "moe_intermediate_size": 64, "share_expert_dim": 64},
    **{
        "moe_layers_enum": "1",
        "layer_types": ["full_attention", "sliding_attention"],
        "swiglu_limits_shared": [0, 7],
    },
)
QWEN = qwen_port.ModelArgs(
    model_type="qwen3_5",
    text_config={
        **{"model_type": "qwen3_5_text", "hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 64},
        **{"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
        **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32},
        **{"linear_value_head_dim": 32, "full_attention_interval": 4, "tie_word_embeddings": False},
    },
)
GLM = glm4_moe.ModelArgs(
    **{"model_type": "glm4_moe", "vocab_size": 64, "hidden_size": 128, "intermediate_size": 128},
    **{"max_position_embeddings": 512, "moe_intermediate_size": 64, "norm_topk_prob": True, "n_group": 1},
    **{"num_attention_heads": 4, "head_dim": 32, "topk_group": 1, "n_shared_experts": 1, "n_routed_experts": 8},
    **{"routed_scaling_factor": 1.0, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_hidden_layers": 2},
    **{"num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "use_qk_norm": True},
    **{"tie_word_embeddings": False, "attention_bias": True, "partial_rotary_factor": 0.5, "rope_scaling": None},
)
LAYERS: dict[str, tuple[Callable[[], Any], int]] = {
    "Step-3.5, dense": (lambda: step_port.Model(STEP), 0),
    "Step-3.5, experts": (lambda: step_port.Model(STEP), 1),
    "Qwen3.5, gated delta": (lambda: qwen_port.Model(QWEN), 0),
    "Qwen3.5, attention": (lambda: qwen_port.Model(QWEN), 3),
    "GLM-4.5, dense": (lambda: glm_port.Model(GLM), 0),
    "GLM-4.5, experts": (lambda: glm_port.Model(GLM), 1),
}


ATTENTION = mx.fast.metal_kernel(name="attention", input_names=["q", "k", "v"], output_names=["out"], source=";")


def attention(q: mx.array, k: mx.array, v: mx.array, **_: Any) -> mx.array:
    shape = (*q.shape[:-1], v.shape[-1])
    (out,) = ATTENTION(
        inputs=[q, k, v], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[shape], output_dtypes=[q.dtype]
    )
    return out


def one(x: mx.array, *_: Any, **__: Any) -> mx.array:
    return mx.negative(x)


@contextmanager
def as_on_a_mac() -> Iterator[None]:
    """Kernels are chosen, and what is one launch on a GPU (on a CPU a graph of its own) is one operation."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(mx.metal, "is_available", return_value=True))
        stack.enter_context(mock.patch.object(mx, "default_device", return_value=mx.Device(mx.gpu)))
        for name, stand_in in (("rms_norm", one), ("rope", one), ("scaled_dot_product_attention", attention)):
            stack.enter_context(mock.patch.object(mx.fast, name, stand_in))
        yield


def operations(fn: Callable[[mx.array], Any], x: mx.array) -> Counter:
    """The primitives of a graph that are no views, by name."""
    names = []
    mx.export_function(lambda event: names.append(event["name"]) if event["type"] == "primitive" else None, fn, x)
    return Counter(name for name in names if name not in VIEWS)


def verify(model: Any, index: int) -> Counter:
    """A layer's verify, with a verify before it of which two rows were accepted; recorded as on a Mac."""
    layer, x = model.layers[index], mx.zeros((1, ROWS, 128), mx.bfloat16)
    cache = make_prompt_cache(model).layers[index]
    cache.reserve(64)
    layer(x, mask=cache.make_mask(ROWS), cache=cache)
    cache.seek(mx.array([ROWS]), ROWS)
    layer(x, mask=cache.make_mask(ROWS, return_array=True), cache=cache)
    cache.seek(mx.array([ROWS + 2]), 2 * ROWS)
    mx.eval(cache.parts)
    mask = cache.make_mask(ROWS, return_array=True)
    with as_on_a_mac():
        return operations(lambda x: layer(x, mask=mask, cache=cache), x)


@click.command(help=__doc__)
def main() -> None:
    table = Table(title=f"operations of one layer's verify of {ROWS} rows")
    for column in ("layer", "stock MLX", "of these products", "with the kernels", "of these kernels"):
        table.add_column(column, justify="left" if column == "layer" else "right")
    mx.disable_compile()
    for name, (make, index) in LAYERS.items():
        model = make()
        nn.quantize(model, group_size=32, bits=4, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
        model.set_dtype(mx.bfloat16)
        mx.eval(model.parameters())
        before = verify(model, index)
        for site in switch.place(model):
            site.rows = frozenset(site.candidates)
        after = verify(model, index)
        products = before["QuantizedMatmul"] + before["Matmul"]
        kernels = after["CustomKernel"] - (model.windows()[index] != "recurrent")  # but for attention's stand-in
        counts = (before.total(), products, after.total(), kernels)
        table.add_row(name, *map(str, counts))
    Console().print(table)


if __name__ == "__main__":
    main()
