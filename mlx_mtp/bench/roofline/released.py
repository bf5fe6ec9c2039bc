"""List released models by name, as mlx-lm converts them to 4 bits, with their draft heads."""

from .ops import AttentionOp, DraftHeadOps, ExpertsOp, LatentOp, LayerOps, LinearOp, ModelOps, Op, StateOp

Ops = tuple[Op, ...]


def gqa(h: int, heads: int, kv: int, dim: int, *, window: int | None = None, gate: int = 0) -> Ops:
    """Describe attention with its projections; `gate` rows more for gates of heads or values."""
    queries = LinearOp("q", heads * dim + gate, h)
    keys_values = LinearOp("k", kv * dim, h), LinearOp("v", kv * dim, h)
    return queries, *keys_values, AttentionOp(heads, kv, dim, window), LinearOp("o", h, heads * dim)


def mlp(h: int, width: int, name: str = "mlp") -> Ops:
    """Describe the three matrices of an MLP."""
    return LinearOp(f"{name} gate", width, h), LinearOp(f"{name} up", width, h), LinearOp(f"{name} down", h, width)


def moe(h: int, width: int, total: int, top: int) -> Ops:
    """Describe router, routed experts and one shared expert of the same width."""
    return LinearOp("router", total, h, bits=8), ExpertsOp(h, width, total, top), *mlp(h, width, "shared")


def delta(h: int, key_heads: int, value_heads: int, dim: int = 128) -> Ops:
    """Describe a gated-delta mixer."""
    qkv, v = (2 * key_heads + value_heads) * dim, value_heads * dim
    inputs = LinearOp("qkv", qkv, h), LinearOp("z", v, h), LinearOp("b, a", 2 * value_heads, h)
    return *inputs, StateOp(value_heads * dim * dim * 4), LinearOp("o", h, v)


def mla(h: int, heads: int, q_rank: int, rank: int, rope: int, nope: int, value: int) -> Ops:
    """Describe absorbed MLA with its projections."""
    queries = LinearOp("q_a", q_rank, h), LinearOp("q_b", heads * (nope + rope), q_rank)
    latent = LinearOp("kv_a", rank + rope, h), LinearOp("embed_q", heads * rank, nope)
    outputs = LinearOp("unembed_out", heads * value, rank), LinearOp("o", h, heads * value)
    return *queries, *latent, LatentOp(heads, rank, rope, nope, value), *outputs


def draft_head(layer: LayerOps, h: int, lm_head: LinearOp) -> DraftHeadOps:
    """Describe a block like a layer's behind the product that joins embedding and hidden state."""
    return DraftHeadOps(LayerOps(layer.kind, 1, (LinearOp("eh_proj", h, 2 * h), *layer.ops)), lm_head)


def recycled(h: int, vocabulary: int, *layers: LayerOps) -> ModelOps:
    """Describe a model with one draft head of the last layer's kind, fed its own output again."""
    head = LinearOp("lm_head", vocabulary, h)
    return ModelOps(layers, head, (draft_head(layers[-1], h, head),), recycled=True)


def step() -> ModelOps:
    h, head = 4096, LinearOp("lm_head", 128896, 4096)
    full, sliding = gqa(h, 64, 8, 128, gate=64), gqa(h, 96, 8, 128, window=512, gate=96)
    experts, dense = moe(h, 1280, 288, 8), mlp(h, 11264)
    first = LayerOps("step dense", 1, (*full, *dense)), LayerOps("step dense", 2, (*sliding, *dense))
    rest = LayerOps("step experts", 11, (*full, *experts)), LayerOps("step experts", 31, (*sliding, *experts))
    return ModelOps((*first, *rest), head, (draft_head(first[1], h, head),) * 3)


def glm() -> ModelOps:
    h, attention = 5120, gqa(5120, 96, 8, 128)
    dense = LayerOps("glm dense", 3, (*attention, *mlp(h, 12288)))
    return recycled(h, 151552, dense, LayerOps("glm experts", 89, (*attention, *moe(h, 1536, 160, 8))))


def qwen_dense() -> ModelOps:
    h, ffn = 5120, mlp(5120, 17408)
    mixer = LayerOps("qwen delta", 48, (*delta(h, 16, 48), *ffn))
    return recycled(h, 248320, mixer, LayerOps("qwen attention", 16, (*gqa(h, 24, 4, 256, gate=24 * 256), *ffn)))


def qwen_experts() -> ModelOps:
    h, ffn = 2048, moe(2048, 512, 256, 8)
    mixer = LayerOps("qwen delta experts", 30, (*delta(h, 16, 32), *ffn))
    attention = (*gqa(h, 16, 2, 256, gate=16 * 256), *ffn)
    return recycled(h, 248320, mixer, LayerOps("qwen attention experts", 10, attention))


def deepseek() -> ModelOps:
    h, attention = 7168, mla(7168, 128, 1536, 512, 64, 128, 128)
    dense = LayerOps("deepseek dense", 3, (*attention, *mlp(h, 18432)))
    return recycled(h, 129280, dense, LayerOps("deepseek experts", 58, (*attention, *moe(h, 2048, 256, 8))))


MODELS = {
    "Step-3.5-Flash": step(),
    "GLM-4.5": glm(),
    "Qwen3.6-27B": qwen_dense(),
    "Qwen3.6-35B-A3B": qwen_experts(),
    "DeepSeek-V3": deepseek(),
}
