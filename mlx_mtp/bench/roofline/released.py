"""Released models by name, as mlx-lm converts them to 4 bits, with their draft heads."""

from .ops import Attention, DraftHead, Experts, Latent, Layer, Linear, Model, Op, State


def gqa(h: int, heads: int, kv: int, dim: int, *, window: int | None = None, gate: int = 0) -> tuple[Op, ...]:
    """Attention with its projections; `gate` rows more for gates of heads or values."""
    return (
        *(Linear("q", heads * dim + gate, h), Linear("k", kv * dim, h), Linear("v", kv * dim, h)),
        *(Attention(heads, kv, dim, window), Linear("o", h, heads * dim)),
    )


def mlp(h: int, width: int, name: str = "mlp") -> tuple[Op, ...]:
    return Linear(f"{name} gate", width, h), Linear(f"{name} up", width, h), Linear(f"{name} down", h, width)


def moe(h: int, width: int, total: int, top: int) -> tuple[Op, ...]:
    """Router, routed experts and one shared expert of the same width."""
    return Linear("router", total, h, bits=8), Experts(h, width, total, top), *mlp(h, width, "shared")


def delta(h: int, key_heads: int, value_heads: int, dim: int = 128) -> tuple[Op, ...]:
    """A gated-delta mixer."""
    qkv, v = (2 * key_heads + value_heads) * dim, value_heads * dim
    state = State(value_heads * dim * dim * 4)
    return Linear("qkv", qkv, h), Linear("z", v, h), Linear("b, a", 2 * value_heads, h), state, Linear("o", h, v)


def mla(h: int, heads: int, q_rank: int, rank: int, rope: int, nope: int, value: int) -> tuple[Op, ...]:
    return (
        *(Linear("q_a", q_rank, h), Linear("q_b", heads * (nope + rope), q_rank), Linear("kv_a", rank + rope, h)),
        *(Linear("embed_q", heads * rank, nope), Latent(heads, rank, rope, nope, value)),
        *(Linear("unembed_out", heads * value, rank), Linear("o", h, heads * value)),
    )


def draft_head(kind: str, h: int, block: tuple[Op, ...], lm_head: Linear) -> DraftHead:
    """A block of a layer's kind behind the product that joins embedding and hidden state."""
    return DraftHead(Layer(kind, 1, (Linear("eh_proj", h, 2 * h), *block)), lm_head)


def step() -> Model:
    h, full = 4096, gqa(4096, 64, 8, 128, gate=64)
    sliding = gqa(4096, 96, 8, 128, window=512, gate=96)
    experts, dense = moe(h, 1280, 288, 8), mlp(h, 11264)
    layers = (
        *(Layer("step dense", 1, (*full, *dense)), Layer("step dense", 2, (*sliding, *dense))),
        *(Layer("step experts", 11, (*full, *experts)), Layer("step experts", 31, (*sliding, *experts))),
    )
    head = Linear("lm_head", 128896, h)
    return Model(layers, head, (draft_head("step dense", h, (*sliding, *dense), head),) * 3)


def glm() -> Model:
    h, attention = 5120, gqa(5120, 96, 8, 128)
    experts = (*attention, *moe(h, 1536, 160, 8))
    layers = Layer("glm dense", 3, (*attention, *mlp(h, 12288))), Layer("glm experts", 89, experts)
    head = Linear("lm_head", 151552, h)
    return Model(layers, head, (draft_head("glm experts", h, experts, head),), recycled=True)


def qwen_dense() -> Model:
    h, ffn = 5120, mlp(5120, 17408)
    attention = (*gqa(h, 24, 4, 256, gate=24 * 256), *ffn)
    layers = Layer("qwen delta", 48, (*delta(h, 16, 48), *ffn)), Layer("qwen attention", 16, attention)
    head = Linear("lm_head", 248320, h)
    return Model(layers, head, (draft_head("qwen attention", h, attention, head),), recycled=True)


def qwen_experts() -> Model:
    h, ffn = 2048, moe(2048, 512, 256, 8)
    attention = (*gqa(h, 16, 2, 256, gate=16 * 256), *ffn)
    layers = (
        Layer("qwen delta experts", 30, (*delta(h, 16, 32), *ffn)),
        Layer("qwen attention experts", 10, attention),
    )
    head = Linear("lm_head", 248320, h)
    return Model(layers, head, (draft_head("qwen attention experts", h, attention, head),), recycled=True)


def deepseek() -> Model:
    h, attention = 7168, mla(7168, 128, 1536, 512, 64, 128, 128)
    experts = (*attention, *moe(h, 2048, 256, 8))
    layers = Layer("deepseek dense", 3, (*attention, *mlp(h, 18432))), Layer("deepseek experts", 58, experts)
    head = Linear("lm_head", 129280, h)
    return Model(layers, head, (draft_head("deepseek experts", h, experts, head),), recycled=True)


def dense_70b() -> Model:
    """Llama's shape at 70B with K2's vocabulary; only for a published row."""
    layer = Layer("glm dense", 80, (*gqa(8192, 64, 8, 128), *mlp(8192, 28672)))
    return Model((layer,), Linear("lm_head", 250112, 8192))


MODELS = {
    "Step-3.5-Flash": step(),
    "GLM-4.5": glm(),
    "Qwen3.6-27B": qwen_dense(),
    "Qwen3.6-35B-A3B": qwen_experts(),
    "DeepSeek-V3": deepseek(),
}
