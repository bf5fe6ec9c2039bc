"""Run the experts of several texts in pieces, where mlx-lm's modules would sort rows by expert for all at once.

They do so from SORTED choices on, with other kernels, whose bits are not those of a text alone.
"""

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

SORTED = 64


class InPieces:
    """Mixin in front of a mixture of experts: x [n, L, H] of n texts and their choices [n, L, top_k]."""

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        n = len(x)
        if n == 1 or indices.size < SORTED or indices.ndim < 3:
            return super().__call__(x, indices)  # type: ignore[misc]
        texts = max(1, (SORTED - 1) * n // indices.size)  # as many as are not sorted, or one, which is as it is alone
        pieces = [slice(i, i + texts) for i in range(0, n, texts)]
        return mx.concatenate([super(InPieces, self).__call__(x[p], indices[p]) for p in pieces])  # type: ignore[misc]


class GLUInPieces(InPieces, SwitchGLU):
    whole = SwitchGLU


class MLPInPieces(InPieces, SwitchMLP):
    whole = SwitchMLP


CUT = {kind.whole: kind for kind in (GLUInPieces, MLPInPieces)}


def cut_experts(model: nn.Module) -> None:
    """Let a model's mixtures of experts run several texts in pieces."""
    for _, module in model.named_modules():
        if type(module) in CUT:
            module.__class__ = CUT[type(module)]
