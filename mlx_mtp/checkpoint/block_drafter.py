"""Attach a block drafter to its target: check that both match, and choose the type of its activations."""

from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..decoding.drafters.block import Block
from ..decoding.drafters.heads import Heads
from ..decoding.drafters.heads_and_block import HeadsAndBlock
from ..decoding.graph_memory import nbytes
from ..decoding.options import default_draft_tokens
from ..layers.block_drafter import BlockNetwork
from ..machine.device import has_bfloat16
from .parameters import check_numbers, is_targets, named, origin
from .report import size

OWN = ("head", "embed_tokens")


def attach_block(model: Any, drafter: Any, contents: Any, path: Path) -> str:
    """Attach an opened block drafter to its target `model`; return its source for the report.

    drafter, contents: of `_open_drafter`. path: its directory. Its weights are read; an LM head or embedding that is
    the target's is dropped. ValueError for NaN, a tensor of zeros, or sizes, layers or tokens unlike the target's.
    """
    net = drafter.mtp[0]
    _check_fits(model, net, path)
    if net.shape.frozen_embedding and net.shape.draft_vocab == net.shape.vocab:
        net.pop("head", None)
    if net.shape.frozen_embedding:
        net.pop("embed_tokens", None)
    check_numbers(named(drafter), partial(origin, drafter, contents))
    _tie(model, net)
    net.set_dtype(_activations(model, net))
    net.eval()
    set_drafter(model, with_heads(model, Block(net)))
    return f"{path}, reading the target after layers {', '.join(map(str, net.shape.taps))}"


def with_heads(model: Any, block: Block) -> Block | HeadsAndBlock:
    """Return a drafter of the model's MTP heads and `block`, or `block` alone if the model has no heads."""
    heads = Heads.of(model)
    return HeadsAndBlock(model, heads, block, default_draft_tokens(model)) if heads else block


@contextmanager
def counted(model: Any, net: Any) -> Generator[None, None, None]:
    """Inside the `with` block, count the block drafter `net` among the model's parameters; nothing is evaluated.

    Another kind of network is not counted. After the block the model has no drafter, whatever it had before.
    """
    try:
        if isinstance(net, BlockNetwork):
            set_drafter(model, with_heads(model, Block(net)))
        yield
    finally:
        model.drafter = None


def set_drafter(model: Any, drafter: Block | HeadsAndBlock) -> None:
    """Set the model's drafter, whose parameters then count among the model's."""
    model.drafter = drafter
    model["drafter"] = drafter.net  # the attribute above is no module


def _activations(model: Any, net: BlockNetwork) -> mx.Dtype:
    """Return the type of a drafter's activations: the target's, but float32 where MLX would compute in float16.

    Drafters that were trained in bfloat16 overflow in float16, and no draft of a quantized one is accepted.
    """
    dtype = model.no_hidden().dtype
    quantized = any("scales" in module for module in net.modules())
    narrow = dtype == mx.float16 or (dtype == mx.bfloat16 and quantized and not has_bfloat16())
    return mx.float32 if narrow else dtype


def _tie(model: Any, net: BlockNetwork) -> None:
    """Drop the drafter's LM head, and its embedding, if it equals the target's, which the drafter then uses.

    Both are kept if the drafter has d2t, and the embedding if its outputs are scaled.
    """
    shape = net.shape
    for name in OWN:
        plain = name == "head" or shape.embed_scale == 1
        if name in net and plain and "d2t" not in net and is_targets(model, name, net[name]):
            net.pop(name)


def _check_fits(model: Any, net: BlockNetwork, path: Path) -> None:
    """Raise ValueError if sizes, number of layers or tokens of drafter and target do not match.

    Another hidden size is allowed with an embedding and LM head of its own. The drafter's vocabulary may be larger,
    and smaller if it uses the target's embedding, without a selector or Markov head. The target must have the mask
    token and all drafted tokens.
    """
    shape, width, vocab = net.shape, model.no_hidden().shape[-1], model.vocab_size
    layers = len(model.layers)
    if shape.hidden_size != width and not {"embed_tokens", "head"} <= net.keys():
        needed = "so the drafter needs an embedding and an LM head of its own"
        raise ValueError(f"{path}: hidden_size {shape.hidden_size} is not the target's {width}, {needed}")
    if shape.layers not in (None, layers):
        raise ValueError(f"{path}: made for a target of {shape.layers} layers; this one has {layers}")
    needs_all = shape.selector or shape.markov or ("embed_tokens" in net and not shape.frozen_embedding)
    if shape.mask_token >= vocab or (needs_all and shape.vocab < vocab):
        mask = f"; its mask token is {shape.mask_token}" if shape.mask_token >= vocab else ""
        raise ValueError(f"{path}: made for {shape.vocab} tokens, the target has {vocab}{mask}")
    if "d2t" in net and not mx.issubdtype(net.d2t.dtype, mx.integer):
        raise ValueError(f"{path}: tensor d2t has type {net.d2t.dtype}; expected integers")
    if "head" in net:
        tokens = net.token(mx.arange(shape.draft_vocab))
        low, high = (value.item() for value in (tokens.min(), tokens.max()))
        assert isinstance(low, int)
        assert isinstance(high, int)
        if low < 0 or high >= vocab:
            raise ValueError(f"{path}: drafts tokens {low} to {high}, the target has 0 to {vocab - 1}")


def block_facts(net: BlockNetwork) -> str:
    """Return a line about a block drafter: its shape, and the memory of its weights and of its KV caches.

    Caches of full attention are counted for 1,000 tokens, those of windows at their full size.
    """
    shape, kind = net.shape, "quantized" if any("scales" in module for module in net.modules()) else str(net.dtype)
    row = 2 * shape.kv_heads * shape.head_dim * net.dtype.size
    full = sum(reach.before is None for reach in shape.reaches) * row * 1000
    windows = sum((reach.before or 0) * row for reach in shape.reaches)
    kv = [f"{size(full)} of KV with 1,000 tokens"] if full else []
    kv += [f"{size(windows)} of KV in windows"] if windows else []
    weights = f"{size(nbytes(net.parameters()))} of weights, {kind.rpartition('.')[2]}"
    return f"{shape}; {', '.join([weights, *kv])}"
