"""Qwen3.5, 3.6, 3.8 with experts: `qwen3_5` with mlx-lm's splitting of the hub's fused `gate_up_proj`."""

from mlx_lm.models import qwen3_5_moe

from . import qwen3_5
from .qwen3_5 import ModelArgs

__all__ = ["Model", "ModelArgs"]


class Model(qwen3_5.Model):
    """The port; see the contract in `mlx_mtp.models`."""

    BASE = qwen3_5_moe.Model
