"""Prepare MTP heads for training, as copies of a model's own or as new ones, and quantize the trained heads."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map, tree_map_with_path, tree_unflatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear
from mlx_lm.utils import dequantize_model

from ..checkpoint.expand_heads import QUANTIZED
from ..checkpoint.tuned import lend_rows
from ..layers.lm_head import sliced
from ..layers.mtp_head import MTPHead
from ..layers.scaled import SCALE
from ..layers.with_heads import TUNED

LOW_RANK = LoRALinear, LoRASwitchLinear
Formats = dict[str, dict[str, Any]]


@cache
def rounded(kind: type) -> type:
    """Return a subclass of the linear layer's class `kind` that computes with its weight quantized and dequantized.

    `_format`, set on each layer, has the group_size, bits and mode. The weight itself stays exact, and its gradient
    is that of the rounded weight (Bengio et al., arXiv 1308.3432). Equal kinds return the same class.
    """

    def call(self: Any, x: mx.array) -> mx.array:
        exact = self.weight
        near = mx.dequantize(*mx.quantize(mx.stop_gradient(exact), **self._format), **self._format)
        self.weight = exact + mx.stop_gradient(near.astype(exact.dtype) - exact)
        try:
            return kind.__call__(self, x)
        finally:
            self.weight = exact

    return type(f"Rounded{kind.__name__}", (kind,), {"__call__": call})


class Trained(nn.Module):
    """A module whose list `mtp` contains heads, so that a gradient of this module is one of these heads alone."""

    def __init__(self, heads: Sequence[nn.Module]):
        super().__init__()
        self.mtp: list[Any] = list(heads)


@dataclass
class Workshop:
    """A model whose `mtp` contains the heads in training, and what is needed to train and to finish them.

    trained: the module with these heads. teacher: an LM head over the tokens that the heads draft, a float copy of
    the target's rows. ranks: int32 [V], each token's index in that LM head; -1 for tokens that are not drafted.
    depths: number of drafts of a cycle in the training. formats: group size, bits and mode of each module to quantize
    in the finished heads, by path in `trained`. before: the model's `mtp` and `spec`, which `restore` puts back.
    shared: for each head, whether `teacher` is its LM head, which is then not trained.
    """

    model: Any
    trained: Trained
    teacher: nn.Linear
    ranks: mx.array
    depths: int
    formats: Formats
    before: tuple[Any, Any]
    shared: list[bool] = field(default_factory=list)

    def restore(self) -> None:
        """Set `mtp` and `spec` of the model to those before the training."""
        self.model.mtp, self.model.spec = self.before

    def finished(self) -> list[Any]:
        """Return a list of evaluated copies of the trained heads, quantized to `formats`; low-rank updates are added.

        A head of `tune-heads --new` with a draft vocabulary gets the target's LM-head rows of it as its LM head. A
        floating-point parameter of the model's own heads has the type that it had before the training, and one of a
        new head that of the target's last norm.
        """
        heads = Trained([copy.deepcopy(head) for head in self.trained.mtp])
        for head, shared in zip(heads.mtp, self.shared, strict=True):
            if shared:
                head.pop("head")
        for path, module in heads.named_modules():
            if type(module) is rounded(nn.Linear):
                module.__class__ = nn.Linear
            elif isinstance(module, LOW_RANK):
                heads.update_modules(tree_unflatten([(path, module.fuse(dequantize=True))]))
        nn.quantize(heads, class_predicate=lambda path, _: self.formats.get(path, False))
        new = self.model.spec.prefix == TUNED.prefix  # a path of the heads before is then of another parameter
        old: Any = {} if new else dict(tree_flatten(Trained(self.before[0]).parameters()))
        typed = partial(_as_before, old, self.model.no_hidden().dtype)
        heads.update(tree_map_with_path(typed, heads.parameters()))
        for head in heads.mtp if self.model.spec.prefix == TUNED.prefix else ():
            lend_rows(self.model, head)
        mx.eval(heads.parameters())
        return heads.mtp


def _as_before(old: dict[str, mx.array], usual: mx.Dtype, path: str, w: mx.array) -> mx.array:
    """Return `w` in the type of old[path], or in `usual` without that path; unchanged if not of floating point."""
    if not mx.issubdtype(w.dtype, mx.floating):
        return w
    return w.astype(old[path].dtype if path in old else usual)


def existing(model: Any, dtype: mx.Dtype, rank: int | None = None) -> Workshop:
    """Return a `Workshop` with copies of the model's heads in `dtype`, which become `model.mtp`.

    rank: leave quantized matrices quantized, and train only low-rank updates of this rank; None dequantizes the
    matrices and trains all parameters, except embeddings and the target's LM head. ValueError for heads in a format
    that MLX cannot quantize to, with a rank for heads that are not quantized, and with one above the hidden size.
    """
    before = model.mtp, model.spec
    heads = Trained([copy.deepcopy(head) for head in model.mtp])
    formats = _formats(heads)
    if rank is not None:
        if not formats:
            raise ValueError(f"rank={rank}: the heads are not quantized; allowed is None")
        if rank > (most := model.width):
            raise ValueError(f"rank={rank}: allowed are 1 to {most}, the model's hidden size")
        _add_low_rank(heads, rank)
    # A recycled head is trained for a chain of two drafts.
    depths = 2 if model.spec.topology == "recycle" else len(heads.mtp)
    return _open(model, heads, formats, depths, before, dtype)


def _add_low_rank(heads: Trained, rank: int) -> None:
    """Add a low-rank update to every quantized linear layer, also of experts, and freeze all other parameters."""
    heads.freeze()
    for path, module in heads.named_modules():
        kinds = {nn.QuantizedLinear: LoRALinear, QuantizedSwitchLinear: LoRASwitchLinear}
        if kind := kinds.get(type(module)):
            update: Any = kind.from_base(module, r=rank, scale=2.0)
            update.freeze(keys=["weight", "scales", "biases", "bias"])
            update.unfreeze(keys=["lora_a", "lora_b"], recurse=False)
            heads.update_modules(tree_unflatten([(path, update)]))


def new(model: Any, tokens: Sequence[int] | None, depths: int, bits: int | None, dtype: mx.Dtype) -> Workshop:
    """Return a `Workshop` with one new recycled head, initialised from the target's last layer with attention.

    The head becomes `model.mtp`, and `model.spec` describes it. tokens: ids that it drafts; None for all. depths:
    drafts of a cycle in the training. bits: of the finished head's matrices; None does not quantize it. dtype: of the
    parameters in training. ValueError if no layer has attention.
    """
    before = model.mtp, model.spec
    model.spec = replace(TUNED, draft_vocab=0 if tokens is None else len(tokens))
    with model.runtime.adapters.using(None):  # adapters wrap modules, and the head gets plain ones
        whole: Any = dequantize_model(Trained([model.like_last_layer()]))
    block = whole.mtp[0]
    head: Any = MTPHead(model.spec, block, model.final_norm, model.vocab_size, mask_array=model.MASK_ARRAY)
    head.norm.update(tree_map(lambda w: w + 0, model.final_norm.parameters()))
    size = model.width
    half = mx.eye(size) * 0.5**0.5
    head.eh_proj.weight = mx.concatenate([half, half], axis=-1)
    if tokens is not None:
        ids = mx.array(sorted(tokens))
        head.d2t = (ids - mx.arange(ids.size)).astype(mx.int32)
    heads = Trained([head])
    formats = {} if bits is None else _new_formats(heads, bits)
    model.mtp = heads.mtp
    return _open(model, heads, formats, depths, before, dtype)


def set_scale(workshop: Workshop, hidden: mx.array) -> None:
    """Multiply a new head's `eh_proj` by the median root mean square of rows `hidden` [n, width] of the target.

    Its layer then reads rows of about the size that it had as the target's layer.
    """
    head = workshop.trained.mtp[0]
    rms = mx.sqrt((hidden.astype(mx.float32) ** 2).mean(axis=-1))
    head.eh_proj.weight = head.eh_proj.weight * mx.sort(rms)[rms.size // 2].astype(head.eh_proj.weight.dtype)


def _open(model: Any, heads: Trained, formats: Formats, depths: int, before: Any, dtype: mx.Dtype) -> Workshop:
    for path, module in heads.named_modules():
        if SCALE in module or getattr(module, "mode", "affine") not in ("affine", "mxfp4", "mxfp8", "nvfp4"):
            raise ValueError(f"{path}: its format cannot be trained; convert the heads with --mtp-q-bits 8 first")
    model.mtp = heads.mtp
    teacher, ranks = _teacher(model, heads.mtp[0], dtype)
    if not any(isinstance(module, LOW_RANK) for module in heads.modules()):
        dequantize_model(heads)
    shared = ["head" not in head or ("d2t" in head and model.spec.draft_vocab > 0) for head in heads.mtp]
    for head, lent in zip(heads.mtp, shared, strict=True):
        if lent:
            head.head = teacher
    heads.set_dtype(dtype)
    for head, lent in zip(heads.mtp, shared, strict=True):
        head.freeze(keys=["d2t"], recurse=False, strict=False)
        for name in ("embed_tokens", *(("head",) if lent else ())):
            if name in head:
                head[name].freeze()
    for path, module in heads.named_modules():
        if type(module) is nn.Linear and formats.get(path, {}).get("bits", 8) < 8:
            module.__class__ = rounded(nn.Linear)
            module._format = formats[path]
    mx.eval(heads.parameters(), teacher.parameters())
    return Workshop(model, heads, teacher, ranks, depths, formats, before, shared)


def _teacher(model: Any, head: Any, dtype: mx.Dtype) -> tuple[nn.Linear, mx.array]:
    """Return `teacher` and `ranks` of `Workshop` for the tokens that `head` drafts. dtype: of the LM head."""
    whole: Any = model.unembedding()
    rows = mx.arange(whole["weight"].shape[0])
    if "d2t" in head:
        rows = head.token(mx.arange(head.d2t.size))
    part: Any = dequantize_model(Trained([sliced(whole, rows)]))
    teacher = part.mtp[0]
    teacher.set_dtype(dtype)
    teacher.freeze()
    ranks = mx.full((model.vocab_size,), -1, mx.int32)
    inside = rows < model.vocab_size
    ranks[mx.where(inside, rows, 0)] = mx.where(inside, mx.arange(rows.size), 0).astype(mx.int32)
    return teacher, ranks


def _formats(heads: Trained) -> Formats:
    return {
        path: {"group_size": module.group_size, "bits": module.bits, "mode": getattr(module, "mode", "affine")}
        for path, module in heads.named_modules()
        if isinstance(module, QUANTIZED)
    }


def _new_formats(heads: Trained, bits: int) -> Formats:
    """Return the formats of a new head's matrices by path: groups of 64, or of 32 where 64 does not divide the width.

    Matrices whose width 32 does not divide are left out, and so stay unquantized.
    """
    found: Formats = {}
    for path, module in heads.named_modules():
        if hasattr(module, "to_quantized") and "weight" in module:
            groups = [size for size in (64, 32) if module.weight.shape[-1] % size == 0]
            if groups:
                found[path] = {"group_size": groups[0], "bits": bits, "mode": "affine"}
    return found
