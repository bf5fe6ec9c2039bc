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


def released(lm_head: LinearOp, *kinds: tuple[str, int, Ops, Ops], like: int = -1, heads: int = 1) -> ModelOps:
    """Describe a model by kinds of layers: a row of launches.csv, how many, mixer, and MLP.

    heads: so many, each behind the product that joins its inputs a layer `like` that, are chained; one alone is fed
    its own output again.
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
    "DeepSeek-V3": released(
        LinearOp("lm_head", 129280, 7168),
        ("deepseek dense", 3, mla(7168, 128, 1536, 512, 64, 128, 128), mlp(7168, 18432)),
        ("deepseek experts", 58, mla(7168, 128, 1536, 512, 64, 128, 128), moe(7168, 2048, 256, 8)),
    ),
}
