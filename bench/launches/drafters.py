"""Give a model of `models.MODELS` a tiny block drafter with the released number and kinds of layers."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mtp.checkpoint.block_drafter import set_drafter
from mlx_mtp.decoding.drafters.block import Block
from mlx_mtp.layers.block_drafter import BlockNetwork, BlockShape
from mlx_mtp.layers.block_mask import Reach

from .models import HEADS, SIZES, WIDTH

KINDS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {"conv": (2, 16), "selector": (32, 16)},
    "dspark": {"markov": ("vanilla", 32), "anchored": True},
}


def set_block_drafter(model: Any, kind: str, layers: int = 5) -> Block:
    """Set a quantized drafter of a kind of KINDS as the model's, without its MTP heads; return it.

    It reads the target after as many layers as it has itself, two or more.
    """
    shape = BlockShape(
        **{"hidden_size": WIDTH, "captured": WIDTH, "intermediate_size": SIZES["intermediate_size"]},
        **{"heads": HEADS["num_attention_heads"], "kv_heads": 2, "head_dim": HEADS["head_dim"], "eps": 1e-5},
        **{"vocab": SIZES["vocab_size"], "draft_vocab": SIZES["vocab_size"], "drafts": 15, "mask_token": 5},
        taps=tuple(1 + i * (len(model.layers) - 2) // (layers - 1) for i in range(layers)),
        reaches=(Reach(2047),) * (layers - 1) + (Reach(),),
        **{"rope_theta": 1e4, "rope": None, "positions": 2048},
        **KINDS[kind],
    )
    net = BlockNetwork(shape, set())
    nn.quantize(net, group_size=32, bits=4, class_predicate=lambda _, m: hasattr(m, "to_quantized"))
    net.set_dtype(mx.bfloat16)
    mx.eval(net.parameters())
    model.mtp = []
    set_drafter(model, Block(net))
    return model.drafter
