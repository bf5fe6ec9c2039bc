"""Released models by name, as mlx-lm converts them to 4 bits, with their draft heads."""

from .ops import AttentionOp, DraftHeadOps, ExpertsOp, LatentOp, LayerOps, LinearOp, ModelOps, Op, StateOp


def gqa(h: int, heads: int, kv: int, dim: int, *, window: int | None = None, gate: int = 0) -> tuple[Op, ...]:
    """AttentionOp with its projections; `gate` rows more for gates of heads or values."""
    return (
        *(LinearOp("q", heads * dim + gate, h), LinearOp("k", kv * dim, h), LinearOp("v", kv * dim, h)),
        *(AttentionOp(heads, kv, dim, window), LinearOp("o", h, heads * dim)),
    )


def mlp(h: int, width: int, name: str = "mlp") -> tuple[Op, ...]:
    return LinearOp(f"{name} gate", width, h), LinearOp(f"{name} up", width, h), LinearOp(f"{name} down", h, width)


def moe(h: int, width: int, total: int, top: int) -> tuple[Op, ...]:
    """Router, routed experts and one shared expert of the same width."""
    return LinearOp("router", total, h, bits=8), ExpertsOp(h, width, total, top), *mlp(h, width, "shared")


def delta(h: int, key_heads: int, value_heads: int, dim: int = 128) -> tuple[Op, ...]:
    """A gated-delta mixer."""
    qkv, v = (2 * key_heads + value_heads) * dim, value_heads * dim
    state = StateOp(value_heads * dim * dim * 4)
    return (
        LinearOp("qkv", qkv, h),
        LinearOp("z", v, h),
        LinearOp("b, a", 2 * value_heads, h),
        state,
        LinearOp("o", h, v),
    )


def mla(h: int, heads: int, q_rank: int, rank: int, rope: int, nope: int, value: int) -> tuple[Op, ...]:
    return (
        *(
            LinearOp("q_a", q_rank, h),
            LinearOp("q_b", heads * (nope + rope), q_rank),
            LinearOp("kv_a", rank + rope, h),
        ),
        *(LinearOp("embed_q", heads * rank, nope), LatentOp(heads, rank, rope, nope, value)),
        *(LinearOp("unembed_out", heads * value, rank), LinearOp("o", h, heads * value)),
    )


def draft_head(kind: str, h: int, block: tuple[Op, ...], lm_head: LinearOp) -> DraftHeadOps:
    """A block of a layer's kind behind the product that joins embedding and hidden state."""
    return DraftHeadOps(LayerOps(kind, 1, (LinearOp("eh_proj", h, 2 * h), *block)), lm_head)


def step() -> ModelOps:
    h, full = 4096, gqa(4096, 64, 8, 128, gate=64)
    sliding = gqa(4096, 96, 8, 128, window=512, gate=96)
    experts, dense = moe(h, 1280, 288, 8), mlp(h, 11264)
    layers = (
        *(LayerOps("step dense", 1, (*full, *dense)), LayerOps("step dense", 2, (*sliding, *dense))),
        *(LayerOps("step experts", 11, (*full, *experts)), LayerOps("step experts", 31, (*sliding, *experts))),
    )
    head = LinearOp("lm_head", 128896, h)
    return ModelOps(layers, head, (draft_head("step dense", h, (*sliding, *dense), head),) * 3)


def glm() -> ModelOps:
    h, attention = 5120, gqa(5120, 96, 8, 128)
    experts = (*attention, *moe(h, 1536, 160, 8))
    layers = LayerOps("glm dense", 3, (*attention, *mlp(h, 12288))), LayerOps("glm experts", 89, experts)
    head = LinearOp("lm_head", 151552, h)
    return ModelOps(layers, head, (draft_head("glm experts", h, experts, head),), recycled=True)


def qwen_dense() -> ModelOps:
    h, ffn = 5120, mlp(5120, 17408)
    attention = (*gqa(h, 24, 4, 256, gate=24 * 256), *ffn)
    layers = LayerOps("qwen delta", 48, (*delta(h, 16, 48), *ffn)), LayerOps("qwen attention", 16, attention)
    head = LinearOp("lm_head", 248320, h)
    return ModelOps(layers, head, (draft_head("qwen attention", h, attention, head),), recycled=True)


def qwen_experts() -> ModelOps:
    h, ffn = 2048, moe(2048, 512, 256, 8)
    attention = (*gqa(h, 16, 2, 256, gate=16 * 256), *ffn)
    layers = (
        LayerOps("qwen delta experts", 30, (*delta(h, 16, 32), *ffn)),
        LayerOps("qwen attention experts", 10, attention),
    )
    head = LinearOp("lm_head", 248320, h)
    return ModelOps(layers, head, (draft_head("qwen attention experts", h, attention, head),), recycled=True)


def deepseek() -> ModelOps:
    h, attention = 7168, mla(7168, 128, 1536, 512, 64, 128, 128)
    experts = (*attention, *moe(h, 2048, 256, 8))
    layers = LayerOps("deepseek dense", 3, (*attention, *mlp(h, 18432))), LayerOps("deepseek experts", 58, experts)
    head = LinearOp("lm_head", 129280, h)
    return ModelOps(layers, head, (draft_head("deepseek experts", h, experts, head),), recycled=True)


MODELS = {
    "Step-3.5-Flash": step(),
    "GLM-4.5": glm(),
    "Qwen3.6-27B": qwen_dense(),
    "Qwen3.6-35B-A3B": qwen_experts(),
    "DeepSeek-V3": deepseek(),
}
