"""What one forward pass of a released model reads and multiplies: layers as lists of a few kinds of operations."""

from collections.abc import Iterable
from dataclasses import dataclass


def packed(weights: float, bits: int, group: int) -> float:
    """Bytes of quantized weights; each group has a scale and a bias of 16 bits."""
    return weights * (bits / 8 + 4 / group)


@dataclass(frozen=True)
class Linear:
    """x [M, K] times weights [N, K]."""

    name: str
    n: int
    k: int
    bits: int = 4
    group: int = 64

    @property
    def weights(self) -> int:
        return self.n * self.k

    @property
    def nbytes(self) -> float:
        return packed(self.weights, self.bits, self.group)


@dataclass(frozen=True)
class Experts:
    """Gate, up and down of `top` of `total` experts for each token."""

    hidden: int
    width: int
    total: int
    top: int
    name: str = "experts"
    bits: int = 4
    group: int = 64

    @property
    def weights(self) -> int:
        return 3 * self.hidden * self.width

    @property
    def nbytes(self) -> float:
        return packed(self.weights, self.bits, self.group)


@dataclass(frozen=True)
class Attention:
    """Rows of `heads` queries over the cache of `kv` heads; bfloat16."""

    heads: int
    kv: int
    dim: int
    window: int | None = None
    name: str = "attention"


@dataclass(frozen=True)
class Latent:
    """MLA's attention over a cache of rank + rope values a token, shared by all heads."""

    heads: int
    rank: int
    rope: int
    nope: int
    value: int
    name: str = "attention"


@dataclass(frozen=True)
class State:
    """A recurrent state in float32, read and written once a pass whatever M is."""

    nbytes: int
    name: str = "state"


Op = Linear | Experts | Attention | Latent | State


@dataclass(frozen=True)
class Layer:
    kind: str  # a row of roofline_cost.LAUNCHES
    count: int
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Model:
    layers: tuple[Layer, ...]
    head: Linear

    def linears(self) -> Iterable[tuple[int, Linear]]:
        yield 1, self.head
        for layer in self.layers:
            yield from ((layer.count, op) for op in layer.ops if isinstance(op, Linear))

    def experts(self) -> Iterable[tuple[int, Experts]]:
        for layer in self.layers:
            yield from ((layer.count, op) for op in layer.ops if isinstance(op, Experts))

    @property
    def shared_bytes(self) -> float:
        """Of weights that every step reads; the embedding is not among them."""
        return sum(count * op.nbytes for count, op in self.linears())

    @property
    def routed_bytes(self) -> float:
        """Of the experts that one token visits."""
        return sum(count * op.top * op.nbytes for count, op in self.experts())

    @property
    def total_bytes(self) -> float:
        """Of all weights; the embedding is as large as the head."""
        routed = sum(count * op.total * op.nbytes for count, op in self.experts())
        return self.shared_bytes + self.head.nbytes + routed


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


def step() -> Model:
    h, full = 4096, gqa(4096, 64, 8, 128, gate=64)
    sliding = gqa(4096, 96, 8, 128, window=512, gate=96)
    experts = moe(h, 1280, 288, 8)
    layers = (
        *(Layer("step dense", 1, (*full, *mlp(h, 11264))), Layer("step dense", 2, (*sliding, *mlp(h, 11264)))),
        *(Layer("step experts", 11, (*full, *experts)), Layer("step experts", 31, (*sliding, *experts))),
    )
    return Model(layers, Linear("lm_head", 128896, h))


def glm() -> Model:
    h, attention = 5120, gqa(5120, 96, 8, 128)
    layers = (
        Layer("glm dense", 3, (*attention, *mlp(h, 12288))),
        Layer("glm experts", 89, (*attention, *moe(h, 1536, 160, 8))),
    )
    return Model(layers, Linear("lm_head", 151552, h))


def qwen_dense() -> Model:
    h, ffn = 5120, mlp(5120, 17408)
    attention = gqa(h, 24, 4, 256, gate=24 * 256)
    layers = Layer("qwen delta", 48, (*delta(h, 16, 48), *ffn)), Layer("qwen attention", 16, (*attention, *ffn))
    return Model(layers, Linear("lm_head", 248320, h))


def qwen_experts() -> Model:
    h, ffn = 2048, moe(2048, 512, 256, 8)
    attention = gqa(h, 16, 2, 256, gate=16 * 256)
    layers = (
        Layer("qwen delta experts", 30, (*delta(h, 16, 32), *ffn)),
        Layer("qwen attention experts", 10, (*attention, *ffn)),
    )
    return Model(layers, Linear("lm_head", 248320, h))


def deepseek() -> Model:
    h, attention = 7168, mla(7168, 128, 1536, 512, 64, 128, 128)
    layers = (
        Layer("deepseek dense", 3, (*attention, *mlp(h, 18432))),
        Layer("deepseek experts", 58, (*attention, *moe(h, 2048, 256, 8))),
    )
    return Model(layers, Linear("lm_head", 129280, h))


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
