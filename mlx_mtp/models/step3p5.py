"""Step-3.5-Flash: mlx-lm's backbone with its three chained MTP depths.

Depth k is checkpoint layer num_hidden_layers + k: a sliding-attention decoder layer that reads the target's
hidden state before the final norm (k = 0) or depth k-1's block output, and ends in an LM head of its own.
Sources: vLLM `step3p5_mtp.py`, SGLang `step3p5_mtp.py`, llama.cpp PRs 23274 and 24340.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models import step3p5
from mlx_lm.models.base import create_attention_mask

from ..layers.mtp_head import MTPHead
from ..spec import MTPSpec

SPEC = MTPSpec(
    topology="chain",
    capture="pre",
    feedback="pre",
    fuse="eh",
    own_head=True,
    tensors=(
        (r"(enorm|hnorm|eh_proj)\.", r"\1."),
        (r"transformer\.shared_head\.norm\.", "norm."),
        (r"transformer\.shared_head\.output\.", "head."),
        (r"(self_attn|mlp|input_layernorm|post_attention_layernorm)\.", r"block.\1."),
    ),
)
IGNORED: tuple[str, ...] = ()
RAW_NAME = r"\.moe\.|(?<!\.mlp)\.share_expert\."
CONVERTED_NAME = r"\.switch_mlp\.|\.mlp\.share_expert\.|\.mlp\.gate\.gate\.|\.scales$"


@dataclass
class ModelArgs(step3p5.ModelArgs):
    """config.json of `step3p5`, field names as in the file."""

    def padded(self, heads: int) -> "ModelArgs":
        """Per-layer lists extended over the heads, for configs that were cut to num_hidden_layers entries.

        The missing entries are those of the released config: sliding, theta 1e4, full rotary, dense.
        """
        total = self.num_hidden_layers + heads
        fill: dict[str, Any] = {"layer_types": "sliding_attention", "partial_rotary_factors": 1.0}
        if isinstance(self.rope_theta, list):
            fill["rope_theta"] = 10000.0
        lists = {name: list(getattr(self, name) or []) for name in fill}
        padded = {n: v + [fill[n]] * (total - len(v)) for n, v in lists.items() if v and len(v) < total}
        return replace(self, **padded)


class Model(step3p5.Model):
    """The port; see the contract in `mlx_mtp.models`."""

    def __init__(self, args: ModelArgs, heads: int = 0):
        args = args.padded(heads)
        super().__init__(args)
        norm = partial(step3p5.ZeroCenteredRMSNorm, eps=args.rms_norm_eps)
        layers = [step3p5.Step3p5DecoderLayer(args, args.num_hidden_layers + k) for k in range(heads)]
        self.mtp = [MTPHead(SPEC, layer, norm, args.hidden_size, args.vocab_size) for layer in layers]

    def hidden(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        model, x = self.model, self.model.embed_tokens(tokens)
        full: Any = None
        swa: Any = None
        if model._full_idx is not None:
            full = create_attention_mask(x, cache[model._full_idx])
        if model._swa_idx is not None:
            swa = create_attention_mask(x, cache[model._swa_idx], window_size=self.args.sliding_window)
        for layer, c in zip(model.layers, cache, strict=True):
            x = layer(x, mask=swa if layer.is_sliding else full, cache=c)
        return x

    def logits(self, hidden: mx.array) -> mx.array:
        return self.lm_head(self.model.norm(hidden))

    def embed(self, tokens: mx.array) -> mx.array:
        return self.model.embed_tokens(tokens)

    def capture(self, hidden: mx.array) -> mx.array:
        return hidden

    def draft_logits(self, depth: int, output: mx.array) -> mx.array:
        head = self.mtp[depth]
        return head.head(head.norm(output))

    def no_hidden(self) -> mx.array:
        return mx.zeros((1, 1, self.args.hidden_size), self.model.norm.weight.dtype)

    def windows(self) -> list[int | None]:
        return [self.args.sliding_window if layer.is_sliding else None for layer in self.layers]

    def head_windows(self) -> list[int | None]:
        return [self.args.sliding_window if head.block.is_sliding else None for head in self.mtp]

    def renamed(self, name: str) -> list[str]:
        """The parameter paths that checkpoint tensor `name` becomes; empty where it is dropped."""
        head = SPEC.locate(name, self.args.num_hidden_layers)
        if head is not None:
            return [f"mtp.{head[0]}.{head[1]}"]
        return list(step3p5.Model.sanitize(self, {name: mx.zeros(())}))


def sanitize(
    model: Model,
    weights: dict[str, mx.array],
    *,
    heads: dict[str, mx.array],
    shift_trunk: bool,
    shift_heads: bool,
) -> dict[str, mx.array]:
    """Checkpoint tensors -> parameters: names, and the +1 of zero-centred norms where a container lacks it.

    `weights` are the trunk's, `heads` the heads'.
    """
    parameters = step3p5.Model.sanitize(model, weights)
    # mlx-lm shifts a trunk that it can tell by its names to be raw; a dense one it cannot.
    if shift_trunk and parameters.get("model.norm.weight") is weights.get("model.norm.weight"):
        parameters = {path: _shifted(path, w) for path, w in parameters.items()}
    for name, w in heads.items():
        (path,) = model.renamed(name)
        parameters[path] = _shifted(path, w) if shift_heads else w
    return parameters


def _shifted(path: str, weight: mx.array) -> mx.array:
    return weight + 1 if path.endswith("norm.weight") else weight
