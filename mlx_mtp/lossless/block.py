"""Measure how often a block drafter predicts the target's tokens on given texts, and try other wirings of it.

At position p it reads the context rows of positions 0..p and the true token p + 1, and drafts a block. Each draft is
compared with the target's own token. Contexts are read once, without a ring or a rollback, so that the decode
loop's drafts can be compared with these.
"""

import math
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.rope_utils import initialize_rope

from ..cache.kinds import make_caches
from ..cache.slots import PooledKV, Span
from ..decoding.drafters.block import MOST, Block
from ..decoding.drafters.block_choice import BlockChoice
from ..layers.target import Target
from .heads import Known
from .rounding_judge import OnePass
from .wirings import Norms, norms_of

TOGETHER = 32  # blocks of a pass
TRIED = 128  # positions of a text at which other wirings are tried
MOST_MASKS = 32  # tokens that are tried as the mask token
# Groups of norms that a converter may have shifted by one, or failed to.
NORMS = {
    "all norms": r"",
    "hidden_norm": r"hidden_norm\.",
    "the norms of the layers": r"layers\.\d+\.(input|post_attention)_layernorm\.",
    "q_norm and k_norm": r".*self_attn\.",
    "the last norm": r"norm\.",
}


def block_of(model: Any) -> Block:
    """Return a model's block drafter, also if it drafts together with MTP heads."""
    return getattr(model.drafter, "block", model.drafter)


def right_block(model: Target, text: Known, k: int) -> list[mx.array]:
    """Return per draft of blocks of k whether it is right at each position: boolean [L - 1 - draft], evaluated."""
    drafter, length = block_of(model), text.tokens.size
    contexts = make_caches([None] * len(drafter.windows), starts=[0] * len(drafter.windows))
    for kv in contexts:
        kv.reserve(length + 2 * MOST)
    drafter.net.append(drafter.context(model, text.hidden), contexts)
    found = []
    for first in range(0, length - 1, TOGETHER):
        positions = mx.arange(first, min(first + TOGETHER, length - 1)) + 1
        caches = [shared(kv.parts, positions, length) for kv in contexts]
        newest = mx.take(text.tokens, positions)[:, None].astype(mx.int32)
        rows, nobody = drafter.rows(model, caches, newest, k), [None] * positions.size
        choose = BlockChoice(model, drafter.net, nobody, newest, positions + 1, confidence=False)
        drafts = choose(rows).tokens
        mx.eval(drafts)
        found.append(drafts)
    tokens = mx.concatenate(found) if found else mx.zeros((0, k), mx.int32)
    rights = [tokens[: max(length - 1 - j, 0), j] == text.predicted[1 + j :] for j in range(k)]
    mx.eval(rights)
    return rights


def shared(parts: Any, positions: mx.array, limit: int) -> PooledKV:
    """Return a pool's cache of sequences, one at each of `positions`, that have the keys and values `parts` [1, ...].

    limit: upper bound of the positions.
    """
    kv, n = PooledKV(), positions.size
    kv.span, kv.offset, kv.limit = Span(range(n), n), positions, limit
    kv.parts = tuple(mx.broadcast_to(part, (n, *part.shape[1:])) for part in parts)
    return kv


@dataclass(frozen=True)
class BlockWiring:
    """A change of a block drafter's wiring; a field that has its default changes nothing.

    shape: values that replace the BlockShape's. norms: a regex of norms' paths, and the value added to their weights.
    hidden: offset of the hidden rows that are read.
    """

    name: str
    shape: dict[str, Any] = field(default_factory=dict)
    norms: tuple[str, int] | None = None
    hidden: int = 0

    def right(self, model: Target, text: Known, depths: int) -> list[mx.array]:
        """Return `right_block` of the text's `first_positions` with this wiring; then restore the model's wiring."""
        text = first_positions(text, depths)
        with wired(model, self):
            if "taps" in self.shape:
                text = replace(text, hidden=OnePass(model, text.tokens.tolist()).hidden)  # type: ignore[arg-type]
            return right_block(model, text.shifted(self.hidden) if self.hidden else text, depths)


def first_positions(text: Known, k: int) -> Known:
    """Return a text cut to its first TRIED + k tokens, so that the last of k drafts has TRIED positions."""
    n = TRIED + k
    return Known(text.tokens[:n], text.hidden[:, :n], text.predicted[:n])


@contextmanager
def wired(model: Any, wiring: BlockWiring) -> Generator[None, None, None]:
    """Apply a wiring, except `hidden`, to the model's block drafter inside the block; then restore it."""
    drafter = block_of(model)
    net, shape = drafter.net, drafter.net.shape
    path, shift = wiring.norms or (r"$", 0)
    norms = norms_of(net, path)
    try:
        _set(drafter, replace(shape, **wiring.shape), [(name, w + shift) for name, w in norms])
        yield
    finally:
        _set(drafter, shape, norms)


def _set(drafter: Block, shape: Any, norms: Norms) -> None:
    net = drafter.net
    net.shape, drafter.reads = shape, shape.taps
    net.rope = initialize_rope(shape.head_dim, shape.rope_theta, shape.interleaved, shape.rope, shape.positions)
    for layer, reach in zip(net.layers, shape.reaches, strict=True):
        layer.self_attn.reach = reach
    net.load_weights(norms, strict=False)


def block_alternatives(model: Target, masks: Iterable[int]) -> list[BlockWiring]:
    """Return the wirings to try for the model's block drafter; each differs from its own in one thing.

    masks: tokens that may be the mask token; at most MOST_MASKS of them are tried, besides the two neighbours of the
    drafter's mask token.
    """
    shape, layers = block_of(model).net.shape, len(model.layers)
    found = []
    for by in (1, -1):
        taps = tuple(tap + by for tap in shape.taps)
        if min(taps) >= 0 and max(taps) <= layers:
            found.append(BlockWiring(f"the target read after layers {', '.join(map(str, taps))}", {"taps": taps}))
    if len(shape.taps) > 1:
        found.append(BlockWiring("the target's layers in the reverse order", {"taps": shape.taps[::-1]}))
    found += [
        BlockWiring(f"the hidden rows of the position {w}", hidden=by) for by, w in ((-1, "before"), (1, "after"))
    ]
    own = shape.mask_token
    near = [token for token in (own - 1, own + 1) if 0 <= token < model.vocab_size]
    others = dict.fromkeys([*near, *(token for token in masks if 0 <= token < model.vocab_size and token != own)])
    found += [
        BlockWiring(f"mask token {token}", {"mask_token": token}) for token in [*others][: MOST_MASKS + len(near)]
    ]
    found.append(
        BlockWiring(f"the newest token's row {'not ' * shape.anchored}read", {"anchored": not shape.anchored})
    )
    one_way = any(reach.causal for reach in shape.reaches)
    reaches = tuple(reach._replace(causal=not one_way) for reach in shape.reaches)
    found.append(BlockWiring(f"causal={not one_way} for {one_way}", {"reaches": reaches}))
    if (scale := math.sqrt(shape.hidden_size) if shape.embed_scale == 1 else 1.0) != shape.embed_scale:
        found.append(BlockWiring(f"embeddings times {scale:.4g} for {shape.embed_scale:.4g}", {"embed_scale": scale}))
    found.append(BlockWiring("RoPE of the other pairs", {"interleaved": not shape.interleaved}))
    for name, path in NORMS.items():
        found += [BlockWiring(f"{name} {shift:+d}", norms=(path, shift)) for shift in (1, -1)]
    return found
