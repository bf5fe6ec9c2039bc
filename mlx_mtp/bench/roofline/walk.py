"""Walk a port's modules and list what they read and multiply."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from ...layers.gated_delta import GatedDelta
from ...layers.mamba2 import Mamba2
from ...layers.mla import AbsorbedMLA
from ...layers.mtp_head import EagleHead
from ...layers.norm_rope import Form
from ...layers.port import Port
from ...layers.sparse_mla import SparseMLA
from .ops import AttentionOp, DraftHeadOps, ExpertsOp, LatentOp, LayerOps, LinearOp, ModelOps, Op, StateOp

TOP = ("top_k", "num_experts_per_tok", "moe_top_k")  # what mlx-lm's routers call the experts of a token
SWITCHES = (SwitchLinear, QuantizedSwitchLinear)
OUTSIDE = ("head", "embed_tokens")  # of a draft head's modules: LM head, and an embedding that is looked up


def of_port(model: Port, float_bytes: int | None = None) -> ModelOps:
    """List the operations of a port's model, whose weights are not read.

    float_bytes: of a weight that is not quantized, and of a value in the caches; None takes what the model has.
    Vectors (norms, biases) are left out, and so is an embedding that is only looked up.
    """
    width = float_bytes or model.no_hidden().dtype.size
    windows = {id(layer): w for layer, w in zip(model.cached_layers(), model.windows(), strict=True)}
    counted = Counter(tuple(_ops(model, layer, windows.get(id(layer)), width)) for layer in model.layers)
    layers = tuple(LayerOps(kind_of(ops), count, ops) for ops, count in counted.items())
    lm_head = _linear("lm_head", model.unembedding(), width)
    drafts = tuple(_draft_head(model, depth, width) for depth in range(len(model.mtp)))
    return ModelOps(layers, lm_head, drafts, model.spec.topology == "recycle" and len(drafts) == 1)


def _draft_head(model: Port, depth: int, width: int) -> DraftHeadOps:
    head: Any = model.mtp[depth]
    parts = [child for name, child in head.children().items() if name not in OUTSIDE]
    ops = tuple(op for child in parts for op in _ops(model, child, head.window, width))
    return DraftHeadOps(LayerOps(kind_of(ops), 1, ops), _linear("lm_head", model.unembedding(depth), width))


def kind_of(ops: tuple[Op, ...]) -> str:
    """Choose the kind of layer, of those whose launches were counted, that is most like one of these operations."""
    kinds = {type(op) for op in ops}
    experts = " experts" if ExpertsOp in kinds else ""
    if StateOp in kinds:
        return "qwen delta" + experts
    return ("deepseek" if LatentOp in kinds else "glm") + (experts or " dense")


def _ops(model: Port, block: Any, window: Any, width: int) -> Iterator[Op]:
    """List the operations of a module and all inside it."""
    modules: dict[str, Any] = dict(block.named_modules())
    for path, module in modules.items():
        yield from _mixer(model, module, window, width)
        if any(isinstance(child, SWITCHES) for child in module.children().values()):
            yield _experts(module, modules[path.rpartition(".")[0]], width)
        elif (weight := module.get("weight")) is not None and weight.ndim > 1 and not isinstance(module, SWITCHES):
            yield _linear(path.rpartition(".")[2], module, width)


def _mixer(model: Port, module: Any, window: Any, width: int) -> Iterator[Op]:
    """List what a module that mixes positions does beside its projections."""
    kind = type(module)
    if kind in {*model.ATTENTION, *(head.attention for head in model.mtp if isinstance(head, EagleHead))}:
        form = Form.of(module)
        yield AttentionOp(form.heads, form.kv_heads, form.head_dim, window, "attention", form.value_dim, width)
    elif issubclass(kind, AbsorbedMLA):
        sizes = module.kv_lora_rank, module.qk_rope_head_dim, module.qk_nope_head_dim, module.v_head_dim
        top = model.args.index_topk if issubclass(kind, SparseMLA) else None
        index = module.indexer.head_dim if "indexer" in module else 0  # layers may share what one of them chose
        yield LatentOp(module.num_heads, *sizes, top=top, index=index, value_bytes=width)
    elif issubclass(kind, GatedDelta):
        yield StateOp(module.num_v_heads * module.head_v_dim * module.head_k_dim * 4)
    elif issubclass(kind, Mamba2):
        yield StateOp(module.num_heads * module.head_dim * module.ssm_state_size * 4)


def _experts(module: Any, block: Any, width: int) -> ExpertsOp:
    """Describe a module that holds an MLP's matrices for all experts, inside the block that routes to it."""
    made = [child for child in module.children().values() if isinstance(child, SWITCHES)]
    shapes = [_shape(child) for child in made]
    total, n, k = shapes[0]
    assert {total * n * k} == {math.prod(shape) for shape in shapes}, "matrices of several sizes"
    owners = (block, block.get("gate"))
    tops = [top for owner in owners for name in TOP if isinstance(top := getattr(owner, name, None), int)]
    if not tops:
        raise ValueError(f"config.json: {' or '.join(TOP)} must say how many experts a token visits")
    return ExpertsOp(k, n, total, tops[0], "experts", *_format(made, width), len(made))


def _linear(name: str, module: Any, width: int) -> LinearOp:
    many, n, k = _shape(module)
    return LinearOp(name, many * n, k, *_format([module], width))


def _shape(module: Any) -> tuple[int, int, int]:
    """Give how many matrices, N, K."""
    *many, n, k = module.weight.shape
    return math.prod(many), n, module.scales.shape[-1] * module.group_size if "scales" in module else k


def _format(modules: Sequence[Any], width: int) -> tuple[float, float | None]:
    """Give bits of a weight, and the group that has as many bytes of scales as there are; None: not quantized."""
    quantized = [module.bits for module in modules if "scales" in module]
    if not quantized:
        return 8 * width, None
    names = "weight", "scales", "biases"
    arrays = [module[name] for module in modules for name in names if module.get(name) is not None]
    nbytes = sum(a.size * (width if mx.issubdtype(a.dtype, mx.floating) else a.itemsize) for a in arrays)
    weights = sum(math.prod(_shape(module)) for module in modules)
    return min(quantized), 4 / (nbytes / weights - min(quantized) / 8)
