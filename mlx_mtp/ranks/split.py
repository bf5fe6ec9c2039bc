"""Split a target's layers over ranks with mlx-lm's `shard`, before any weight is read; MTP heads are not split.

Each rank has a share of every layer's attention heads, with their keys and values, and of each expert or MLP. Two
sums over the ranks per layer, after attention and after the MLP, restore the full rows.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.nn.layers import distributed
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.minimax import ShardedRMSNorm

from ..kernels import BLOCK_FORMATS
from ..machine.errors import one_line
from .ordered_sum import OrderedRMSNorm, sum_over

MAX_LISTED = 64  # maximum number of ranks that a message lists
SUMMED = distributed.ShardedToAllLinear, distributed.QuantizedShardedToAllLinear
SHARDED = *SUMMED, distributed.AllToShardedLinear, distributed.QuantizedAllToShardedLinear  # of mlx-lm's `shard`
SCALE = "output_scale"  # of a quantized linear, see `layers/scaled.py`
HEADS = ("num_heads", "n_heads", "num_attention_heads", "num_k_heads", "num_v_heads")
KV_HEADS = ("num_kv_heads", "n_kv_heads", "num_key_value_heads")
INPUTS_SPLIT = ("o_proj", "out_proj", "down_proj")  # linears of which each rank has a share of the columns


class RankShare(NamedTuple):
    """Stand-in for rank 0's group of ranks if nothing is computed, as for `inspect --ranks`."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


def split(model: Any, group: Any, name: str, before: Callable[[list[Any]], Any] | None = None) -> None:
    """Replace the layers' weights by this rank's part, unevaluated; attention and MLP then return sums over ranks.

    name: the model_type, for messages. before: called with the modules that will sum, while all sums are still
    mlx-lm's own. Raises ValueError if the model cannot be split over these ranks.
    """
    for module in take_part(model, group, name, before):
        sum_over(module, group)
    for module in model.modules():
        if type(module) is nn.RMSNorm and _splits(module, group):
            module.__class__ = OrderedRMSNorm


def take_part(model: Any, group: Any, name: str, before: Callable[[list[Any]], Any] | None = None) -> list[Any]:
    """Replace the layers' weights by this rank's lazy part; return the modules whose outputs must be summed.

    These are each layer's attention (or linear attention) and MLP. before, ValueError: as of `split`.
    """
    check_divides(model, group.size(), name)
    for mixer in (mixer for layer in model.layers for mixer in _mixers(layer)):
        _repeat_kv_heads(mixer, group.size())
    kinds = [{path: type(module) for path, module in layer.named_modules()} for layer in model.layers]
    scales = [_take_scales(layer) for layer in model.layers]
    with one_line(f"ranks={group.size()}: mlx-lm cannot split model_type {name!r}"):
        model.shard(group)
    for layer, taken in zip(model.layers, scales, strict=True):
        _put_scales(layer, taken)
        layer.update(tree_map(mx.contiguous, layer.parameters()))  # frees the other ranks' parts
    parts: list[Any] = [
        part for layer in model.layers for _, part in tree_flatten(layer.children(), is_leaf=nn.Module.is_module)
    ]
    modules = [part for part in parts if any(_splits(module, group) for module in part.modules())]
    inside = {id(module) for part in modules for module in part.modules() if _is_known(module, group)}
    for path, module in model.named_modules():
        if _splits(module, group) and id(module) not in inside:
            raise ValueError(f"ranks={group.size()}: model_type {name!r} cannot be split: mlx-lm splits its {path}")
    if before:
        before(modules)
    for layer, own in zip(model.layers, kinds, strict=True):
        _make_plain(layer, own, first=group.rank() == 0)
    return modules


def _splits(module: Any, group: Any) -> bool:
    return any(value is group for value in (*vars(module).values(), *module.values()))


def _is_known(module: Any, group: Any) -> bool:
    return type(module) in (*SHARDED, ShardedRMSNorm) or getattr(module, "sharding_group", None) is group


def check_divides(model: Any, ranks: int, name: str) -> None:
    """Raise ValueError if the model cannot be split over this number of ranks.

    It cannot if mlx-lm does not split its family, if a layer's weights are in GGUF's block formats, or if the ranks
    do not divide a number of heads or of columns; a number of key-value heads may instead divide that of the ranks.
    """
    if not hasattr(model, "shard"):
        raise ValueError(f"ranks={ranks}: mlx-lm has no way to split model_type {name!r}; allowed is 1")
    if any(getattr(module, "mode", None) in BLOCK_FORMATS for layer in model.layers for module in layer.modules()):
        needed = "--gguf-plan affine converts a GGUF file to formats that can"
        raise ValueError(f"ranks={ranks}: weights in GGUF's block formats cannot be split; {needed}")
    sizes = list(_sizes(model))
    for what, size, kv in sizes:
        if not _divides(size, ranks, kv=kv):
            fits = (n for n in range(1, MAX_LISTED + 1) if all(_divides(s, n, kv=kv) for _, s, kv in sizes))
            allowed = ", ".join(map(str, fits))
            raise ValueError(f"ranks={ranks}: model_type {name!r} has {size} {what}; allowed ranks are {allowed}")


def _divides(size: int, ranks: int, *, kv: bool) -> bool:
    """Return whether a size can be split over ranks. kv: of key-value heads, which can be repeated."""
    return size % ranks == 0 or (kv and ranks % size == 0)


def _mixers(layer: Any) -> list[Any]:
    """Return a layer's attention or linear attention, of some families several."""
    return [module for _, module in layer.named_modules() if not {"o_proj", "out_proj"}.isdisjoint(module)]


def _sizes(model: Any) -> Iterator[tuple[str, int, bool]]:
    """Yield each size that must be divisible: (name, size, whether it counts key-value heads)."""
    for i, layer in enumerate(model.layers):
        for mixer in _mixers(layer):
            across = {"q_norm", "q_proj"} <= mixer.keys() and len(mixer.q_norm.weight) == len(mixer.q_proj.weight)
            for attribute in (name for name in (*HEADS, *KV_HEADS) if hasattr(mixer, name)):
                kind = attribute.removeprefix("num_").removeprefix("n_").replace("_", " ")
                kv = attribute in KV_HEADS and not across  # a norm across all heads would see repeated ones
                yield f"{kind} in layer {i}", getattr(mixer, attribute), kv
        for path, linear in layer.named_modules():
            if path.rpartition(".")[2] in INPUTS_SPLIT:
                what, name = ("groups of columns", "scales") if "scales" in linear else ("columns", "weight")
                yield f"{what} in layer {i}'s {path}", linear[name].shape[-1], False


def _repeat_kv_heads(mixer: Any, ranks: int) -> None:
    """Repeat key-value heads, if the ranks do not divide their number, until there is one per rank.

    The number of ranks must then be a multiple of the number of heads. The mixer is changed in place.
    """
    name = next((name for name in KV_HEADS if hasattr(mixer, name)), None)
    if name is None or getattr(mixer, name) % ranks == 0:
        return
    heads = getattr(mixer, name)
    for linear in (mixer.k_proj, mixer.v_proj):
        by_row = {name: w for name, w in linear.parameters().items() if len(w) == len(linear.weight)}
        by_head = tree_map(lambda w: mx.unflatten(w, 0, (heads, -1)), by_row)
        linear.update(tree_map(lambda w: mx.repeat(w, ranks // heads, axis=0).flatten(0, 1), by_head))
    setattr(mixer, name, ranks)


class Taken(NamedTuple):
    """What was removed from a linear before mlx-lm's `shard` splits its layer.

    whole: an output scale per matrix, which each rank keeps whole; None if the scale has a value per output row, and
    is stacked before the linear's own bias in `bias`, which `shard` splits. bias: the type of the own bias, None
    without.
    """

    whole: mx.array | None
    bias: mx.Dtype | None


def _take_scales(layer: Any) -> dict[str, Taken]:
    """Remove the output scales of a layer's linears, and return them by path; see `Taken`."""
    found = {}
    for path, module in layer.named_modules():
        if (scale := module.pop(SCALE, None)) is None:
            continue
        bias = module.get("bias")
        by_row = scale.shape == module["scales"].shape[:-1]
        if by_row:
            module.bias = mx.stack([scale] if bias is None else [scale, bias])
        found[path] = Taken(None if by_row else scale, None if bias is None else bias.dtype)
    return found


def _put_scales(layer: Any, taken: dict[str, Taken]) -> None:
    """Put the output scales back into a layer's split linears: of a scale per row this rank's part, any other whole.

    taken: from `_take_scales`, before the split.
    """
    modules = dict(layer.named_modules())
    for path, (scale, bias) in taken.items():
        module: Any = modules[path]
        if scale is None:
            scale, *own = module.pop("bias")
            if bias is not None:
                module.bias = own[0].astype(bias)
        module[SCALE] = scale
        module.freeze()


def _make_plain(layer: Any, kinds: dict[str, type], *, first: bool) -> None:
    """Restore the classes of a layer's linears, which mlx-lm's `shard` replaced; they do not sum over ranks.

    kinds: the classes by path before the split. first: whether this is rank 0, the only one that keeps the biases of
    outputs that are summed later.
    """
    for path, module in layer.named_modules():
        if type(module) in SHARDED:
            if "bias" in module and not first and type(module) in SUMMED:
                module.pop("bias")
            del module.group
            module.__class__ = kinds[path]
        elif type(module) is ShardedRMSNorm:
            object.__setattr__(module, "__class__", nn.RMSNorm)  # of this rank's part, until `split` changes it
        elif hasattr(module, "sharding_group"):
            module.sharding_group = None  # disables mlx-lm's own sum
