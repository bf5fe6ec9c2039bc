"""List the operations of a model: from a port's modules, or from a table of released models."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from ...layers.blocks import is_blocks
from ...layers.experts import PER_TOKEN, SWITCHES
from ...layers.gated_delta import GatedDelta
from ...layers.mamba2 import Mamba2
from ...layers.mla import AbsorbedMLA
from ...layers.mtp_head import EagleHead
from ...layers.norm_rope import AttentionForm
from ...layers.port import Port
from ...layers.sparse_mla import SparseMLA
from .ops import AttentionOp, DraftHeadOps, ExpertsOp, LatentOp, LayerOps, LinearOp, ModelOps, Op, StateOp

OUTSIDE = ("head", "embed_tokens")  # modules of a draft head that are not in its block


def of_port(model: Port, float_bytes: int | None = None) -> ModelOps:
    """Return the operations of a port's model without reading its weights.

    float_bytes: bytes of an unquantized weight and of a value in the caches; None uses the model's type.
    Vectors (norms, biases) and embeddings that are only looked up are excluded.
    """
    width = float_bytes or model.no_hidden().dtype.size
    windows = {id(layer): w for layer, w in zip(model.cached_layers(), model.windows(), strict=True)}
    counted = Counter(tuple(_ops(model, layer, windows.get(id(layer)), width)) for layer in model.layers)
    layers = tuple(LayerOps(kind_of(ops), count, ops) for ops, count in counted.items())
    lm_head = _linear("lm_head", model.unembedding(), width)
    heads: list[Any] = list(model.mtp)
    drafts = []
    for depth, head in enumerate(heads):
        parts = [child for name, child in head.children().items() if name not in OUTSIDE]
        ops = tuple(op for child in parts for op in _ops(model, child, head.window, width))
        own = _linear("lm_head", model.unembedding(depth), width)
        drafts.append(DraftHeadOps(LayerOps(kind_of(ops), 1, ops), own))
    return ModelOps(layers, lm_head, tuple(drafts), model.spec.topology == "recycle" and len(drafts) == 1)


def kind_of(ops: tuple[Op, ...]) -> str:
    """Return the kind in launches.csv whose number of launches is assumed for a layer with these operations.

    With a recurrence "qwen delta", with latent attention "deepseek", else "glm", each with " experts" if the layer
    has experts. Without them "deepseek" and "glm" have " dense".
    """
    kinds = {type(op) for op in ops}
    experts = " experts" if ExpertsOp in kinds else ""
    if StateOp in kinds:
        return "qwen delta" + experts
    return ("deepseek" if LatentOp in kinds else "glm") + (experts or " dense")


def _ops(model: Port, block: Any, window: Any, width: int) -> Iterator[Op]:
    """Yield the operations of a module and its submodules.

    window: that of its attention (None: all positions). width: bytes of an unquantized weight and of a cached value.
    """
    modules: dict[str, Any] = dict(block.named_modules())
    for path, module in modules.items():
        yield from _mixer(model, module, window, width)
        if any(isinstance(child, SWITCHES) for child in module.children().values()):
            yield _experts(module, modules[path.rpartition(".")[0]], width)
        elif (weight := module.get("weight")) is not None and weight.ndim > 1 and not isinstance(module, SWITCHES):
            yield _linear(path.rpartition(".")[2], module, width)


def _mixer(model: Port, module: Any, window: Any, width: int) -> Iterator[Op]:
    """Yield the operations of a module that mixes positions, except its projections. window, width: as in `_ops`."""
    kind = type(module)
    if kind in {*model.ATTENTION, *(head.attention for head in model.mtp if isinstance(head, EagleHead))}:
        form = AttentionForm.of(module)
        yield AttentionOp(form.heads, form.kv_heads, form.head_dim, window, "attention", form.value_dim, width)
    elif issubclass(kind, AbsorbedMLA):
        sizes = module.kv_lora_rank, module.qk_rope_head_dim, module.qk_nope_head_dim, module.v_head_dim
        top = model.args.index_topk if issubclass(kind, SparseMLA) else None
        index = module.indexer.head_dim if "indexer" in module else 0  # layers may share the selection of one of them
        yield LatentOp(module.num_heads, *sizes, top=top, index=index, value_bytes=width)
    elif issubclass(kind, GatedDelta):
        yield StateOp(module.num_v_heads * module.head_v_dim * module.head_k_dim * 4)
    elif issubclass(kind, Mamba2):
        yield StateOp(module.num_heads * module.head_dim * module.ssm_state_size * 4)


def _experts(module: Any, block: Any, width: int) -> ExpertsOp:
    """Return the ExpertsOp of a module with an MLP's matrices for all experts, inside the block that routes to it.

    width: as in `_ops`. ValueError if the number of experts per token is unknown.
    """
    made = [child for child in module.children().values() if isinstance(child, SWITCHES)]
    shapes = [_shape(child) for child in made]
    total, n, k = shapes[0]
    assert {total * n * k} == {math.prod(shape) for shape in shapes}, "matrices of several sizes"
    owners = (block, block.get("gate"))
    tops = [top for owner in owners for name in PER_TOKEN if isinstance(top := getattr(owner, name, None), int)]
    if not tops:
        raise ValueError(
            "config.json: num_experts_per_tok (Step: moe_top_k) is missing or not an integer; "
            "set it to the number of experts per token"
        )
    packed = any(map(is_blocks, made))
    return ExpertsOp(k, n, total, tops[0], "experts", *_format(made, width), len(made), packed)


def _linear(name: str, module: Any, width: int) -> LinearOp:
    many, n, k = _shape(module)
    return LinearOp(name, many * n, k, *_format([module], width), is_blocks(module))


def _shape(module: Any) -> tuple[int, int, int]:
    """Return the number of matrices, N and K."""
    *many, n, k = module.weight.shape
    return math.prod(many), n, k * 32 // module.bits if "scales" in module else k


def _format(modules: Sequence[Any], width: int) -> tuple[float, float | None]:
    """Return (fewest bits of a weight, the group size that explains all other bytes; None: not quantized).

    width: as in `_ops`.
    """
    quantized = [module.bits for module in modules if "scales" in module]
    if not quantized:
        return 8 * width, None
    names = "weight", "scales", "biases"
    arrays = [module[name] for module in modules for name in names if module.get(name) is not None]
    nbytes = sum(a.size * (width if mx.issubdtype(a.dtype, mx.floating) else a.itemsize) for a in arrays)
    weights = sum(math.prod(_shape(module)) for module in modules)
    return min(quantized), 4 / (nbytes / weights - min(quantized) / 8)


Ops = tuple[Op, ...]


def gqa(h: int, heads: int, kv: int, dim: int, *, window: int | None = None, gate: int = 0) -> Ops:
    """Return the operations of attention and its projections for hidden size h.

    heads, kv: numbers of query and KV heads. dim: of a head. window: number of positions that are read, None: all.
    gate: rows added to the query projection for gates.
    """
    queries = LinearOp("q", heads * dim + gate, h)
    keys_values = LinearOp("k", kv * dim, h), LinearOp("v", kv * dim, h)
    return queries, *keys_values, AttentionOp(heads, kv, dim, window), LinearOp("o", h, heads * dim)


def mlp(h: int, width: int, name: str = "mlp") -> Ops:
    """Return the operations of a gated MLP: three matrices between hidden size h and `width`."""
    return LinearOp(f"{name} gate", width, h), LinearOp(f"{name} up", width, h), LinearOp(f"{name} down", h, width)


def moe(h: int, width: int, total: int, top: int) -> Ops:
    """Return the operations of a router, `total` experts, `top` per token, and one shared expert of equal width."""
    return LinearOp("router", total, h, bits=8), ExpertsOp(h, width, total, top), *mlp(h, width, "shared")


def delta(h: int, key_heads: int, value_heads: int, dim: int = 128) -> Ops:
    """Return the operations of a gated-delta mixer with its projections for hidden size h; dim: of a head."""
    qkv, v = (2 * key_heads + value_heads) * dim, value_heads * dim
    inputs = LinearOp("qkv", qkv, h), LinearOp("z", v, h), LinearOp("b, a", 2 * value_heads, h)
    return *inputs, StateOp(value_heads * dim * dim * 4), LinearOp("o", h, v)


def mla(h: int, heads: int, q_rank: int, rank: int, rope: int, nope: int, value: int) -> Ops:
    """Return the operations of absorbed MLA with its projections for hidden size h.

    q_rank, rank: sizes of the compressed queries and of a latent row. rope, nope, value: sizes of a head's parts.
    """
    queries = LinearOp("q_a", q_rank, h), LinearOp("q_b", heads * (nope + rope), q_rank)
    latent = LinearOp("kv_a", rank + rope, h), LinearOp("embed_q", heads * rank, nope)
    outputs = LinearOp("unembed_out", heads * value, rank), LinearOp("o", h, heads * value)
    return *queries, *latent, LatentOp(heads, rank, rope, nope, value), *outputs


def released(lm_head: LinearOp, *kinds: tuple[str, int, Ops, Ops], like: int = -1, heads: int = 1) -> ModelOps:
    """Return the operations of a released model from its kinds of layers.

    kinds: (row of launches.csv, number of layers, mixer, MLP). heads: number of chained MTP heads, each a projection
        of its inputs and a layer like kinds[like]; a single head is recycled.
    """
    layers = tuple(LayerOps(kind, count, (*mixer, *ffn)) for kind, count, mixer, ffn in kinds)
    joining = LinearOp("eh_proj", lm_head.k, 2 * lm_head.k)
    head = DraftHeadOps(LayerOps(layers[like].kind, 1, (joining, *layers[like].ops)), lm_head)
    return ModelOps(layers, lm_head, (head,) * heads, recycled=heads == 1)


FULL, SLIDING = gqa(4096, 64, 8, 128, gate=64), gqa(4096, 96, 8, 128, window=512, gate=96)
MODELS = {
    "Step-3.5-Flash": released(
        LinearOp("lm_head", 128896, 4096),
        ("step dense", 1, FULL, mlp(4096, 11264)),
        ("step dense", 2, SLIDING, mlp(4096, 11264)),
        ("step experts", 11, FULL, moe(4096, 1280, 288, 8)),
        ("step experts", 31, SLIDING, moe(4096, 1280, 288, 8)),
        like=1,
        heads=3,
    ),
    "GLM-4.5": released(
        LinearOp("lm_head", 151552, 5120),
        ("glm dense", 3, gqa(5120, 96, 8, 128), mlp(5120, 12288)),
        ("glm experts", 89, gqa(5120, 96, 8, 128), moe(5120, 1536, 160, 8)),
    ),
    "Qwen3.6-27B": released(
        LinearOp("lm_head", 248320, 5120),
        ("qwen delta", 48, delta(5120, 16, 48), mlp(5120, 17408)),
        ("qwen attention", 16, gqa(5120, 24, 4, 256, gate=24 * 256), mlp(5120, 17408)),
    ),
    "Qwen3.6-35B-A3B": released(
        LinearOp("lm_head", 248320, 2048),
        ("qwen delta experts", 30, delta(2048, 16, 32), moe(2048, 512, 256, 8)),
        ("qwen attention experts", 10, gqa(2048, 16, 2, 256, gate=16 * 256), moe(2048, 512, 256, 8)),
    ),
    "GLM-4.7-Flash": released(
        LinearOp("lm_head", 154880, 2048),
        ("deepseek dense", 1, mla(2048, 20, 768, 512, 64, 192, 256), mlp(2048, 10240)),
        ("deepseek experts", 46, mla(2048, 20, 768, 512, 64, 192, 256), moe(2048, 1536, 64, 4)),
    ),
    "DeepSeek-V3": released(
        LinearOp("lm_head", 129280, 7168),
        ("deepseek dense", 3, mla(7168, 128, 1536, 512, 64, 128, 128), mlp(7168, 18432)),
        ("deepseek experts", 58, mla(7168, 128, 1536, 512, 64, 128, 128), moe(7168, 2048, 256, 8)),
    ),
}
