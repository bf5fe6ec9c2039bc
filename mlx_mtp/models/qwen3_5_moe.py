"""Port Qwen3.5, 3.6, 3.8 with experts: `qwen3_5` with experts in two tensor layouts.

Qwen3.5-35B-A3B has fused `gate_up_proj` in the trunk and numbered experts in the head; Qwen3.6 fuses both; pruned and
8-bit exports number all experts. mlx-lm splits fused tensors.
"""

import re
from typing import Any

import mlx.core as mx
from mlx_lm.models import qwen3_5_moe

from ..layers.port import NUMBERED_EXPERTS
from . import qwen3_5

ModelArgs = qwen3_5.ModelArgs


class Sanitizer:
    """Holds a `sanitize` that stacks numbered experts and then calls mlx-lm's."""

    @staticmethod
    def sanitize(model: Any, weights: dict[str, mx.array]) -> dict[str, mx.array]:
        experts: dict[str, dict[int, mx.array]] = {}
        others = {}
        for name, w in weights.items():
            if match := re.fullmatch(r"(.+\.mlp\.)experts\.(\d+)\.(.+)", name):
                experts.setdefault(f"{match[1]}switch_mlp.{match[3]}", {})[int(match[2])] = w
            else:
                others[name] = w
        stacked = {name: mx.stack([numbered[e] for e in sorted(numbered)]) for name, numbered in experts.items()}
        return qwen3_5_moe.Model.sanitize(model, others | stacked)


class Model(qwen3_5.Model):
    BASE = Sanitizer
    RENAMED = (NUMBERED_EXPERTS, *qwen3_5.Model.RENAMED)
