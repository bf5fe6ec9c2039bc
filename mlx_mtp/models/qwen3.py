"""Qwen3, dense: no heads of its own, but drafters exist."""

from mlx_lm.models import qwen3
from mlx_lm.models.qwen3 import ModelArgs

from ..layers.port import HeadlessPort

__all__ = ["Model", "ModelArgs"]


class Model(HeadlessPort, qwen3.Model):
    """The port; see the contract in `mlx_mtp.models`."""

    BASE = qwen3.Model
    MLP = (qwen3.MLP,)
    ATTENTION = (qwen3.Attention,)
    BLOCK = (qwen3.TransformerBlock,)
