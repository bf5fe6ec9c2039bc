"""Norm each head of queries and keys, rotate them to their positions, and move heads first, in one launch.

Squares are summed and angles computed as in MLX's two kernels; a row's bits do not depend on other rows.
"""

import math
import struct
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx

from ._source import BLOCK, MOST_BLOCKS, constants, floats, launch, on_metal

HeadRows = tuple[mx.array, mx.array]  # queries [B, Hq, L, D], keys [B, Hk, L, D]


@dataclass(frozen=True, eq=False)
class RopeArguments:
    """The arguments of mx.fast.rope; `mscale` multiplies the rotated values.

    dims: number of rotated values of a head, even. Either `base` or `freqs` [dims / 2]. scale: of positions.
    Raises ValueError for other dims, a wrong shape of freqs, or unless exactly one of base and freqs is given.
    """

    dims: int
    traditional: bool = False
    base: float | None = None
    freqs: mx.array | None = None
    scale: float = 1.0
    mscale: float = 1.0

    def __post_init__(self):
        if self.dims < 2 or self.dims % 2:
            raise ValueError(f"dims is {self.dims}; it must be a positive even number")
        if (self.base is None) == (self.freqs is None):
            raise ValueError(f"base is {self.base} and freqs {self.freqs}; exactly one must be given")
        shape = (self.dims // 2,)
        if self.freqs is not None and self.freqs.shape != shape:
            raise ValueError(f"freqs has shape {self.freqs.shape}; for {self.dims} dims it must be {shape}")

    @staticmethod
    def of(module: Any) -> "RopeArguments | None":
        """Return the Rope of an `nn.RoPE` or of mlx-lm's Llama3RoPE, ProportionalRoPE, YarnRoPE or SuScaledRoPE.

        None for other modules and for subclasses, unless their attribute `plain` is one of these classes.
        """
        kind = getattr(module, "plain", type(module))
        match kind.__module__, kind.__name__:
            case "mlx.nn.layers.positional_encoding", "RoPE":
                return RopeArguments(module.dims, module.traditional, base=module.base, scale=module.scale)
            case "mlx_lm.models.rope_utils", "Llama3RoPE" | "ProportionalRoPE":
                return RopeArguments(module.dims, module.traditional, freqs=module._freqs)
            case "mlx_lm.models.rope_utils", "YarnRoPE":
                return RopeArguments(module.dims, module.traditional, freqs=module._freqs, mscale=module.mscale)
            case "mlx_lm.models.rope_utils", "SuScaledRoPE":
                return RopeArguments(module.dim, freqs=module._freqs, mscale=module._scale)
        return None

    @cached_property
    def rates(self) -> mx.array:
        """The kernel's `freqs`, float32: those of the Rope, or [log2(base)]."""
        if self.freqs is not None:
            return self.freqs.astype(mx.float32)
        assert self.base is not None
        (base,) = struct.unpack("f", struct.pack("f", self.base))  # in MLX's precision
        return constants(mx.float32, math.log2(base))


def norm_rope_ref(
    q: mx.array,
    k: mx.array,
    offset: mx.array | int,
    rope: RopeArguments,
    *,
    q_weight: mx.array | None = None,
    k_weight: mx.array | None = None,
    eps: float = 0.0,
    head_dim: int | None = None,
) -> HeadRows:
    """Return q and k normed (if weights are given), rotated and heads first, by MLX's own ops, as `norm_rope`."""
    D = k.shape[-1] if head_dim is None else head_dim
    queries, keys = (_rotated(x[..., :D], w, eps, offset, rope) for x, w in ((q, q_weight), (k, k_weight)))
    return queries, keys


def _rotated(
    x: mx.array, weight: mx.array | None, eps: float, offset: mx.array | int, rope: RopeArguments
) -> mx.array:
    if weight is not None:
        x = mx.fast.rms_norm(x, weight, eps)
    x = x.transpose(0, 2, 1, 3)
    if rope.mscale != 1.0:
        x = x.at[..., : rope.dims].multiply(rope.mscale)
    how = {"traditional": rope.traditional, "base": rope.base, "freqs": rope.freqs, "scale": rope.scale}
    return mx.fast.rope(x, rope.dims, offset=offset, **how)


def norm_rope(
    q: mx.array,
    k: mx.array,
    offset: mx.array | int,
    rope: RopeArguments,
    *,
    q_weight: mx.array | None = None,
    k_weight: mx.array | None = None,
    eps: float = 0.0,
    head_dim: int | None = None,
) -> HeadRows:
    """Norm queries and keys if weights are given, and rotate them; return [B, Hq, L, D] and [B, Hk, L, D].

    q: [B, L, Hq, D or more], k: [B, L, Hk, D or more], float16, bfloat16 or float32, with any strides; only the first
        D = `head_dim` values of a head are used. None: all of k's.
    offset: the position of row 0, an int or an integer array of one value, or of B, one per sequence.
    q_weight, k_weight: [D], both or none; like rope.freqs they may be views.
    Raises ValueError if shapes do not match, or only one weight is given.
    """
    D = k.shape[-1] if head_dim is None else head_dim
    weights = [weight for weight in (q_weight, k_weight) if weight is not None]
    _check(q, k, offset, rope, weights, D)
    known = q.dtype == k.dtype and len({w.dtype for w in weights}) <= 1 and floats(q, *weights)
    one_each = q.shape[0] == (offset.size if isinstance(offset, mx.array) else 1)
    if not (on_metal() and known and one_each and D <= BLOCK * MOST_BLOCKS):
        return norm_rope_ref(q, k, offset, rope, q_weight=q_weight, k_weight=k_weight, eps=eps, head_dim=D)
    (B, L, Hq, _), Hk = q.shape, k.shape[2]
    at = mx.array([offset]) if isinstance(offset, int) else offset.reshape(-1).astype(mx.int32)
    dtype = mx.result_type(q, *weights[:1])
    steps = (2, 1) if rope.traditional else (1, rope.dims // 2)
    of_q, of_k = weights or (rope.rates, rope.rates)
    inputs = {"q": q, "k": k, "q_weight": of_q, "k_weight": of_k, "offset": at, "freqs": rope.rates}
    inputs |= {"layout": constants(mx.int32, D, rope.dims, *steps), "eps": constants(mx.float32, eps)}
    inputs["factors"] = constants(mx.float32, rope.scale, rope.mscale)
    outputs = {"queries": ((B, Hq, L, D), dtype), "keys": ((B, Hk, L, D), dtype)}
    template: dict[str, object] = {"T": q.dtype, "O": dtype, "NORM": len(weights) > 0}
    template |= {"FREQS": rope.freqs is not None, "BLOCKS": -(-D // BLOCK)}
    grid = (32, Hq + Hk, B * L)
    queries, keys = launch("norm_rope", inputs, outputs, template=template, grid=grid, group=(32, 1, 1))
    return queries, keys


def _check(
    q: mx.array, k: mx.array, offset: mx.array | int, rope: RopeArguments, weights: list[mx.array], D: int
) -> None:
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2]:
        raise ValueError(f"q has shape {q.shape} and k {k.shape}; they must be [B, L, heads, values], of one B and L")
    values = min(q.shape[-1], k.shape[-1])
    if rope.dims > values:
        raise ValueError(f"rope.dims is {rope.dims}; it must be at most {values}, the values of a head")
    if not rope.dims <= D <= values:
        allowed = f"from {rope.dims}, the rotated values, to {values}, the values of a head"
        raise ValueError(f"head_dim is {D}; it must be {allowed}")
    if len(weights) == 1:
        raise ValueError("only one of q_weight and k_weight is given; it must be both or none")
    for weight in weights:
        if weight.shape != (D,):
            raise ValueError(f"a weight has shape {weight.shape}; it must be ({D},)")
    if isinstance(offset, mx.array) and offset.size not in (1, q.shape[0]):
        allowed = "one" if q.shape[0] == 1 else f"one, or {q.shape[0]}"
        raise ValueError(f"offset has {offset.size} values; it must have {allowed}")
