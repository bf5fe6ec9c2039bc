"""Create the cases of `bench kernels`: sites with random weights in released models' shapes, and small ones."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import deepseek_v3, glm4_moe, qwen3_5, step3p5
from mlx_lm.models.mimo_v2_flash import Attention as MiMoAttention
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.qwen3_next import Qwen3NextAttention
from mlx_lm.models.step3p5 import Step3p5Attention
from mlx_lm.models.switch_layers import SwitchGLU

from ..cache.kinds import make_cache
from ..cache.recurrent import RecurrentCache
from ..cache.ring import MAX_ROWS, Ring
from ..kernels import BLOCK_FORMATS, RopeArguments, quantized_blocks
from ..layers.attention import Attention
from ..layers.blocks import made_of
from ..layers.experts import Mixture
from ..layers.gated_delta import Recurrence
from ..layers.lm_head import LMHeadSite, OwnHead
from ..layers.mamba2 import Scan
from ..layers.mla import LatentAttention, OwnPerHead, PerHead
from ..layers.norm_rope import AttentionForm, NormRope
from ..layers.products import GLU, Dense, OwnGLU, OwnStack, Stack
from ..layers.residual_norm import Sum
from ..models import deepseek_v3 as deepseek_port
from ..models.nemotron_h import Mamba2Mixer
from ..models.qwen3_5 import GatedDeltaNet
from ..tuning.lane_sites import in_matrix
from .random_model import draw_weights

# Values of released models' config.json that attention, gated delta and Mamba2 read.
SHAPES = json.loads(Path(__file__).with_name("kernels_shapes.json").read_text())
QWEN, STEP = SHAPES["Qwen3.6-27B"], step3p5.ModelArgs.from_dict(SHAPES["Step-3.5-Flash"])
GLM, MIMO = (cast(Any, SimpleNamespace(**SHAPES[name])) for name in ("GLM-4.5", "MiMo-V2-Flash"))


_dtype: ContextVar[mx.Dtype] = ContextVar("dtype", default=mx.bfloat16)


@contextmanager
def in_type(dtype: mx.Dtype) -> Iterator[None]:
    """Create cases in another type than bfloat16 inside the block."""
    token = _dtype.set(dtype)
    try:
        yield
    finally:
        _dtype.reset(token)


def typed(made: Any) -> Any:
    made.set_dtype(_dtype.get())
    return made


def linear(n: int, k: int, bits: int = 4, group_size: int = 64) -> nn.QuantizedLinear:
    return typed(nn.QuantizedLinear(k, n, bias=False, group_size=group_size, bits=bits))


def blocks(mode: str, module: Any) -> Any:
    """Return a module of the shape of the unquantized `module` in a block format, with random codes.

    All rows have the same scales. Quantizing random weights instead would need more memory than the layer.
    """
    form, (*rows, k) = BLOCK_FORMATS[mode], module.weight.shape
    codes = mx.random.randint(0, 2**16, (*rows, k * form.bits // 16), mx.uint16).view(mx.uint32)
    _, words = quantized_blocks(mx.random.normal((1, k), scale=k**-0.5), mode)
    return made_of(module, mode, codes, mx.tile(words, (*rows, 1)))


def block_linear(mode: str, n: int, k: int) -> Any:
    return blocks(mode, nn.Linear(k, n, bias=False))


def stack(*heights: int, k: int, **more) -> Stack:
    return Stack([linear(n, k, **more) for n in heights])


def glu(h: int, k: int) -> GLU:
    gate, up = linear(h, k), linear(h, k)
    gate.site = up.site = Stack([gate, up])
    return GLU(SimpleNamespace(gate_proj=gate, up_proj=up))


def block_glu(mode: str, h: int, k: int) -> OwnGLU:
    gate, up = block_linear(mode, h, k), block_linear(mode, h, k)
    gate.site = up.site = OwnStack([gate, up])
    return OwnGLU(SimpleNamespace(gate_proj=gate, up_proj=up))


def qwen(kind: type, **sizes: int) -> Any:
    return kind(qwen3_5.TextModelArgs.from_dict({**QWEN, **sizes}))


def mamba2(**sizes: int) -> Scan:
    args = cast(Any, SimpleNamespace(**{**SHAPES["Nemotron-3-Super"], **sizes}))
    return Scan(typed(Mamba2Mixer(args)), RecurrentCache)


def attention(module: Any, window: int | None = None, **format_: int) -> Attention:
    return Attention(
        typed(module), AttentionForm.of(module), partial(make_cache, Ring(window) if window else None, **format_)
    )


def norm_rope(module: Any) -> NormRope:
    rope = RopeArguments.of(module.rope)
    assert rope is not None
    return NormRope(typed(module), AttentionForm.of(module), rope)


def latent(heads: int) -> LatentAttention:
    args = replace(deepseek_v3.ModelArgs(), num_attention_heads=heads, kv_lora_rank=512, qk_rope_head_dim=64)
    return LatentAttention(typed(deepseek_port.Attention(args)))


def per_head(n: int, heads: int) -> PerHead:
    return PerHead(typed(QuantizedMultiLinear(128, n, heads, 64, 4, "affine")), heads_first=True)


def experts(count: int, inner: int, hidden: int, top_k: int, mode: str = "affine") -> Mixture:
    """Return a mixture of `count` experts whose packed weights are random bits.

    Quantizing random weights instead would need more memory than the layer. mode: "affine" for 4 bits and groups of
    64, or a block format. top_k: experts per token.
    """
    switch = SwitchGLU(hidden, inner, count)
    if mode == "affine":
        nn.quantize(switch, 64, 4)
        draw_weights(typed(switch), 0)
    else:
        made = {name: blocks(mode, part) for name, part in switch.children().items() if "weight" in part}
        switch.update_modules(made)
    gate = nn.Module()
    gate.top_k, gate.norm_topk_prob, gate.routed_scaling_factor = top_k, True, 1.0
    gate.router_bias = mx.zeros(count)
    return Mixture(SimpleNamespace(gate=gate, switch_mlp=switch))


CASES: dict[str, tuple[str, Callable[[], Any]]] = {
    "Qwen3.6-27B q, k, v": ("verify_qmm", lambda: stack(12288, 1024, 1024, k=5120)),
    "Qwen3.6-27B qkv, z, b, a": ("verify_qmm", lambda: stack(10240, 6144, 48, 48, k=5120)),
    "Qwen3.6-27B down": ("verify_qmm", lambda: stack(5120, k=17408)),
    "Qwen3.6-27B LM head": ("verify_qmm", lambda: stack(248320, k=5120)),
    "Step-3.5 q, k, v, g": ("verify_qmm", lambda: stack(12288, 1024, 1024, 96, k=4096)),
    "Step-3.5 LM head, 8 bits": ("verify_qmm", lambda: stack(128896, k=4096, bits=8)),
    "Qwen3.6-27B gate, up": ("verify_glu", lambda: glu(17408, 5120)),
    "Step-3.5 shared expert": ("verify_glu", lambda: glu(1280, 4096)),
    "Qwen3.6-27B q, k, v by matrices": ("matrix_qmm", lambda: in_matrix(stack(12288, 1024, 1024, k=5120))),
    "Qwen3.6-27B down by matrices": ("matrix_qmm", lambda: in_matrix(stack(5120, k=17408))),
    "Qwen3.6-27B gate, up by matrices": ("matrix_glu", lambda: in_matrix(glu(17408, 5120))),
    "Qwen3.6-27B tokens by matrices": ("matrix_head", lambda: in_matrix(LMHeadSite(linear(248320, 5120)))),
    "DeepSeek-V3 queries per head by matrices": ("matrix_heads", lambda: in_matrix(per_head(512, 128))),
    "eh_proj by matrices": ("matrix_gemv", lambda: in_matrix(Dense(typed(nn.Linear(8192, 4096, bias=False))))),
    "GLM-4.5 router": ("verify_gemv", lambda: Dense(typed(nn.Linear(5120, 160, bias=False)))),
    "Qwen3.5 shared expert's gate": ("verify_gemv", lambda: Dense(typed(nn.Linear(2048, 1, bias=False)))),
    "eh_proj": ("verify_gemv", lambda: Dense(typed(nn.Linear(8192, 4096, bias=False)))),
    "Qwen3.6-27B recurrence": ("gated_delta_verify", lambda: Recurrence(typed(qwen(GatedDeltaNet)), RecurrentCache)),
    "Nemotron-3-Super recurrence": ("mamba2_verify", mamba2),
    "Step-3.5 attention": ("verify_attention", lambda: attention(Step3p5Attention(STEP, 0))),
    "Step-3.5 sliding attention": ("verify_attention", lambda: attention(Step3p5Attention(STEP, 1), 512)),
    "GLM-4.5 attention": ("verify_attention", lambda: attention(glm4_moe.Attention(GLM))),
    "Qwen3.6-27B attention": ("verify_attention", lambda: attention(qwen(Qwen3NextAttention))),
    "Qwen3.6-27B attention, 8 bits": ("verify_attention", lambda: attention(qwen(Qwen3NextAttention), bits=8)),
    "Qwen3.6-27B attention, 4 bits": ("verify_attention", lambda: attention(qwen(Qwen3NextAttention), bits=4)),
    "MiMo-V2-Flash sliding attention": ("verify_attention", lambda: attention(MiMoAttention(MIMO, True), 128)),
    "DeepSeek-V3 attention": ("verify_latent_attention", lambda: latent(128)),
    "DeepSeek-V3 queries per head": ("verify_qmm_heads", lambda: per_head(512, 128)),
    "Step-3.5 experts": ("verify_moe", lambda: experts(288, 1280, 4096, 8)),
    "Qwen3.6-35B-A3B experts": ("verify_moe", lambda: experts(256, 512, 2048, 8)),
    "Step-3.5 q, k, v, g, IQ4_XS": (
        "verify_qmm",
        lambda: OwnStack([block_linear("iq4_xs", n, 4096) for n in (12288, 1024, 1024, 96)]),
    ),
    "Step-3.5 shared expert, IQ4_XS": ("verify_glu", lambda: block_glu("iq4_xs", 1280, 4096)),
    "Step-3.5 experts, IQ4_XS": ("verify_moe", lambda: experts(288, 1280, 4096, 8, "iq4_xs")),
    "Step-3.5 tokens, Q6_K": ("verify_head", lambda: OwnHead(block_linear("q6_k", 128896, 4096))),
    "DeepSeek-V3 queries per head, IQ4_NL": (
        "verify_qmm_heads",
        lambda: OwnPerHead(blocks("iq4_nl", MultiLinear(128, 512, 128)), heads_first=True),
    ),
    "Qwen3.6-27B tokens": ("verify_head", lambda: LMHeadSite(linear(248320, 5120))),
    "Step-3.5 tokens, 8 bits": ("verify_head", lambda: LMHeadSite(linear(128896, 4096, bits=8))),
    "Step-3.5 sum and norm": ("add_norm", lambda: Sum(typed(nn.RMSNorm(4096)))),
    "Step-3.5 q, k norm and RoPE": ("norm_rope", lambda: norm_rope(Step3p5Attention(STEP, 0))),
    "GLM-4.5 q, k norm and RoPE": ("norm_rope", lambda: norm_rope(glm4_moe.Attention(GLM))),
}

FEW = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}
FEW_DELTA = {"hidden_size": 128, "linear_num_value_heads": 2, "linear_num_key_heads": 1}
POSITIONS = 256  # size of small caches


def near(site: Any) -> Any:
    """Return an attention's site, changed so that its trial rows follow few positions."""
    site.OFFSET, site.SLOTS = POSITIONS - MAX_ROWS, POSITIONS
    return site


# One case per op that the emulator runs in about a second.
SMALL: dict[str, Callable[[], Any]] = {
    "verify_qmm": lambda: stack(64, k=1024),
    "verify_glu": lambda: glu(32, 1024),
    "matrix_qmm": lambda: in_matrix(stack(64, k=1024)),
    "matrix_glu": lambda: in_matrix(glu(32, 1024)),
    "matrix_gemv": lambda: in_matrix(Dense(typed(nn.Linear(1024, 64, bias=False)))),
    "matrix_heads": lambda: in_matrix(per_head(64, 4)),
    "matrix_head": lambda: in_matrix(LMHeadSite(linear(256, 1024))),
    "verify_gemv": lambda: Dense(typed(nn.Linear(1024, 64, bias=False))),
    "gated_delta_verify": lambda: Recurrence(typed(qwen(GatedDeltaNet, **FEW_DELTA)), RecurrentCache),
    "mamba2_verify": lambda: mamba2(hidden_size=64, mamba_num_heads=4, mamba_head_dim=16, n_groups=2),
    "verify_attention": lambda: near(attention(qwen(Qwen3NextAttention, **FEW))),
    "verify_latent_attention": lambda: near(latent(4)),
    "verify_qmm_heads": lambda: per_head(64, 4),
    "verify_moe": lambda: experts(16, 64, 64, 4),
    "verify_head": lambda: LMHeadSite(linear(1024, 512)),
    "add_norm": lambda: Sum(typed(nn.RMSNorm(512))),
    "norm_rope": lambda: norm_rope(qwen(Qwen3NextAttention, **FEW)),
}
