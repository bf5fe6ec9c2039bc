"""Port Step-3.5-Flash: mlx-lm's backbone with its three chained MTP depths.

Depth k is checkpoint layer num_hidden_layers + k: a sliding-attention decoder layer that reads the target's
hidden state before the final norm (k = 0) or depth k-1's block output, and has its own LM head.
Sources: vLLM `step3p5_mtp.py`, SGLang `step3p5_mtp.py`, llama.cpp PRs 23274 and 24340.
"""

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
from mlx_lm.models import step3p5

from ..layers.mtp_spec import MTPSpec, pairs
from ..layers.port import BLOCK_TENSORS, Port, Tensors

NO_LAYER = 10_000  # mlx-lm replaces an empty list of layers by its default
IN_LISTS = ("rope_theta", "partial_rotary_factor")


@dataclass
class ModelArgs(step3p5.ModelArgs):
    """config.json's fields for `step3p5`, with the names in the file."""

    @classmethod
    def respelled(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of transformers' config with per-layer lists instead of values per layer type.

        ValueError if layer types have different rope scalings.
        """
        found = dict(config)
        sparse = found.pop("mlp_layer_types", None)
        kinds = [*(found.get("layer_types") or []), *(found.pop("mtp_layer_types", None) or [])]
        if kinds:
            found["layer_types"] = kinds
        if sparse and not found.get("moe_layers_enum"):
            layers = [i for i, kind in enumerate(sparse) if kind == "sparse"]
            found["moe_layers_enum"] = ",".join(map(str, layers or [NO_LAYER]))
        heads = found.pop("num_sliding_attention_heads", None)
        if heads and not found.get("attention_other_setting"):
            groups = found.get("num_attention_groups") or found["num_key_value_heads"]
            found["attention_other_setting"] = {"num_attention_heads": heads, "num_attention_groups": groups}
        if found.get("query_pre_attn_scalar") == found.get("head_dim"):
            found.pop("query_pre_attn_scalar", None)
        for name in ("per_layer_config", "mtp_mlp_layer_types"):
            found.pop(name, None)
        parameters = found.get("rope_parameters") or {}
        if not any(isinstance(of_kind, dict) for of_kind in parameters.values()):
            return found
        del found["rope_parameters"]
        return found | _rope_lists([parameters[kind] for kind in kinds], kinds)

    def padded(self, heads: int) -> "ModelArgs":
        """Return arguments whose per-layer lists include `heads` MTP heads, also if config.json's lists do not.

        The added entries are those of the released config: sliding attention, theta 1e4, full rotary, dense.
        """
        total = self.num_hidden_layers + heads
        fill: dict[str, Any] = {"layer_types": "sliding_attention", "partial_rotary_factors": 1.0}
        if isinstance(self.rope_theta, list):
            fill["rope_theta"] = 10000.0
        lists = {name: list(getattr(self, name) or []) for name in fill}
        padded = {n: v + [fill[n]] * (total - len(v)) for n, v in lists.items() if v and len(v) < total}
        return replace(self, **padded)


class Model(Port, step3p5.Model):
    SPEC = MTPSpec(
        topology="chain",
        capture="pre",
        feedback="pre",
        head="own",
        tensors=pairs("enorm hnorm eh_proj transformer.shared_head.norm=norm transformer.shared_head.output=head")
        + BLOCK_TENSORS,
    )
    MLP = (step3p5.Step3p5MLP,)
    ATTENTION = (step3p5.Step3p5Attention,)
    MOE = (step3p5.Step3p5MoE,)
    BLOCK = (step3p5.Step3p5DecoderLayer,)
    NORM = (step3p5.ZeroCenteredRMSNorm,)
    IMPLIED = (
        ("use_moe", True),
        ("moe_router_activation", "sigmoid"),
        ("use_moe_router_bias", True),
        ("zero_centered", True),
    )
    ZERO_CENTRED = (
        r"\.moe\.|(?<!\.mlp)\.share_expert\.",
        r"\.switch_mlp\.|\.mlp\.share_expert\.|\.mlp\.gate\.gate\.|\.scales$",
    )

    def __init__(self, args: ModelArgs, heads: int = 0, spec: MTPSpec | None = None):
        super().__init__(args.padded(heads), heads, spec)
        for head in self.mtp:
            head.window = args.sliding_window if head.block.is_sliding else None

    def windows(self) -> list[int | str | None]:
        return [self.args.sliding_window if layer.is_sliding else None for layer in self.layers]

    def renamed(self, name: str) -> list[str]:
        head = self.spec.locate(name, self.args.num_hidden_layers)
        if head is not None:
            return [f"mtp.{head[0]}.{head[1]}"]
        return list(step3p5.Model.sanitize(self, {name: mx.zeros(())}))

    def sanitized(self, trunk: Tensors, heads: Tensors, *, shift_trunk: bool, shift_heads: bool) -> Tensors:
        parameters = step3p5.Model.sanitize(self, trunk)
        # mlx-lm shifts a trunk whose tensor names show that it is raw; a dense trunk has no such names.
        if shift_trunk and parameters.get("model.norm.weight") is trunk.get("model.norm.weight"):
            parameters = {path: _shifted(path, w) for path, w in parameters.items()}
        for name, w in heads.items():
            (path,) = self.renamed(name)
            parameters[path] = _shifted(path, w) if shift_heads else w
        return parameters


def _rope_lists(layers: list[dict[str, Any]], kinds: list[str]) -> dict[str, Any]:
    """Return config.json's entries for the layers' rotary embeddings: lists, and the scaling of some layer types.

    layers: the parameters of each layer; kinds: each layer's type. ValueError if layer types are scaled in different
    ways.
    """
    scaled = {kind: rope for kind, rope in zip(kinds, layers, strict=True) if rope.get("rope_type") != "default"}
    scalings = [{n: v for n, v in rope.items() if n not in IN_LISTS} for rope in scaled.values()]
    if any(scaling != scalings[0] for scaling in scalings):
        raise ValueError("rope_parameters: layers are scaled in more than one way; allowed is one")
    return {
        "rope_theta": [rope["rope_theta"] for rope in layers],
        "partial_rotary_factors": [rope.get("partial_rotary_factor", 1.0) for rope in layers],
        "rope_scaling": scalings[0] if scalings else None,
        "yarn_only_types": list(scaled) or None,
    }


def _shifted(path: str, weight: mx.array) -> mx.array:
    return weight + 1 if path.endswith("norm.weight") else weight
