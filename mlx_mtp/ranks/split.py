"""Split a target's layers over ranks by mlx-lm's `shard`, before any weight is read; MTP heads stay whole.

Of every layer each rank has some of the attention heads, with their keys and values, and a part of each expert or
MLP. Two sums over the ranks a layer, of its attention and of its MLP, make the rows whole again.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import distributed
from mlx.utils import tree_map

from .ordered_sum import sum_over

MOST_RANKS = 64  # that a message lists
PLAIN = {  # what computes a rank's part of what mlx-lm's `shard` makes; sums are ours
    distributed.AllToShardedLinear: nn.Linear,
    distributed.ShardedToAllLinear: nn.Linear,
    distributed.QuantizedAllToShardedLinear: nn.QuantizedLinear,
    distributed.QuantizedShardedToAllLinear: nn.QuantizedLinear,
}
HEADS = ("num_heads", "n_heads", "num_attention_heads", "num_k_heads", "num_v_heads")
KV_HEADS = ("num_kv_heads", "n_kv_heads", "num_key_value_heads")
INPUTS_SPLIT = ("o_proj", "out_proj", "down_proj")  # linears of which each rank has some of the columns


class Share(NamedTuple):
    """Stands for a group of ranks where nothing is computed, as of machines that are not there."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


def split(model: Any, group: Any, name: str) -> None:
    """Leave each rank its part of the target's layers, not computed yet, and let it sum what the parts compute.

    name: the model_type, for messages. Raises ValueError where they cannot be split.
    """
    for module in take_part(model, group, name):
        sum_over(module, group)


def take_part(model: Any, group: Any, name: str) -> list[Any]:
    """Leave of the target's layers this rank's part; returns the modules whose results are now parts of sums."""
    check_divides(model, group.size(), name)
    for layer in model.layers:
        _repeat_kv_heads(_mixer(layer), group.size())
    model.shard(group)
    modules = [module for layer in model.layers for module in (_mixer(layer), layer.mlp)]
    for module in modules:
        module.sharding_group = None  # of mlx-lm's own sum
        _make_plain(module, first=group.rank() == 0)
        module.update(tree_map(mx.contiguous, module.parameters()))  # lets go of the others' parts
    return modules


def check_divides(model: Any, ranks: int, name: str) -> None:
    """Raise ValueError where mlx-lm cannot split the family, or sizes do not divide by the number of ranks."""
    if not hasattr(model, "shard"):
        raise ValueError(f"ranks={ranks}: mlx-lm has no way to split model_type {name!r}; allowed is 1")
    sizes = list(_sizes(model))
    for what, size, kv in sizes:
        if not _divides(size, ranks, kv=kv):
            fits = (n for n in range(1, MOST_RANKS + 1) if all(_divides(s, n, kv=kv) for _, s, kv in sizes))
            allowed = ", ".join(map(str, fits))
            raise ValueError(f"ranks={ranks}: model_type {name!r} has {size} {what}; allowed are {allowed}")


def _divides(size: int, ranks: int, *, kv: bool) -> bool:
    """Tell whether so many ranks can share `size` of something; heads of keys and values may be repeated."""
    return size % ranks == 0 or (kv and ranks % size == 0)


def _mixer(layer: Any) -> Any:
    """Return a layer's attention, or what stands in its place."""
    return layer.linear_attn if getattr(layer, "is_linear", False) else layer.self_attn


def _sizes(model: Any) -> Iterator[tuple[str, int, bool]]:
    """Yield all that has to divide: (what, size, whether it is heads of keys and values)."""
    for i, layer in enumerate(model.layers):
        mixer = _mixer(layer)
        for attribute in (name for name in (*HEADS, *KV_HEADS) if hasattr(mixer, name)):
            kind = attribute.removeprefix("num_").removeprefix("n_").replace("_", " ")
            yield f"{kind} in layer {i}", getattr(mixer, attribute), attribute in KV_HEADS
        for path, linear in [*mixer.named_modules(), *layer.mlp.named_modules()]:
            if path.rpartition(".")[2] in INPUTS_SPLIT:
                what, name = ("groups of columns", "scales") if "scales" in linear else ("columns", "weight")
                yield f"{what} in layer {i}'s {path}", linear[name].shape[-1], False


def _repeat_kv_heads(mixer: Any, ranks: int) -> None:
    """Repeat heads of keys and values where ranks outnumber them, so that each rank has the one that it needs."""
    name = next((name for name in KV_HEADS if hasattr(mixer, name)), None)
    if name is None or getattr(mixer, name) % ranks == 0:
        return
    heads = getattr(mixer, name)
    for linear in (mixer.k_proj, mixer.v_proj):
        linear.update(tree_map(lambda w: _repeated(w, heads, ranks // heads), linear.parameters()))
    setattr(mixer, name, ranks)


def _repeated(w: mx.array, heads: int, times: int) -> mx.array:
    """Repeat each head's rows of w [heads * D, ...]."""
    return mx.repeat(w.reshape(heads, -1, *w.shape[1:]), times, axis=0).reshape(-1, *w.shape[1:])


def _make_plain(module: Any, *, first: bool) -> None:
    """Turn linears that mlx-lm has split into MLX's own; a bias of a sum is the `first` rank's alone."""
    for _, linear in module.named_modules():
        if type(linear) in PLAIN:
            if "bias" in linear and not first and "ShardedToAll" in type(linear).__name__:
                linear.pop("bias")
            linear.__class__ = PLAIN[type(linear)]
