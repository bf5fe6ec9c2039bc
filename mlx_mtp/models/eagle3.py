"""Accept EAGLE-3 drafters: heads in a directory of their own, for the target of any port.

For rows that the target has verified the drafter reads the residual stream at three layers, fused by `fc`; for its
own drafts it reads its own output. Its LM head may cover only part of the vocabulary. Sources: EAGLE-3 (arXiv
2503.01840), vLLM and SGLang `llama_eagle3.py`, speculators `models/eagle3`.
"""

import importlib
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..layers.mtp_head import EagleHead
from ..layers.mtp_spec import MTPSpec, checked_layers, pairs
from .config.normalize import normalize
from .config.rope_modules import apply_rope

ACCEPTED = (
    "an EAGLE-3 head: a directory with config.json and *.safetensors that hold fc, midlayer or layers.0, norm, "
    "lm_head and, for a reduced vocabulary, d2t"
)
JOINS_HEADS = False  # replaces the target's MTP heads
IGNORED = ("t2d", "rotary_emb.inv_freq")  # the inverse of d2t; constants
LAYERS = ("llama", "qwen3")
SPEC = MTPSpec(
    capture=(),  # set from config.json and the target's depth
    feedback="pre",
    head="shared_or_own",
    embedding="shared_or_own",
    prefix=r"(?:model\.)?",
    numbered="zero",
    tensors=pairs(
        "midlayer.hidden_norm=hidden_norm layers.0.hidden_norm=hidden_norm midlayer=block layers.0=block "
        "fc fc_norm input_norm norm embed_tokens d2t lm_head=head"
    ),
)


def refuses(config: dict, names: Collection[str]) -> str | None:
    """Return None if tensor names are an EAGLE-3 head's, else a phrase for the error."""
    own = {name.removeprefix("model.") for name in names}
    layers = {name.split(".")[1] for name in own if name.startswith("layers.")}
    if len(layers) > 1:
        return f"a model of {len(layers)} layers, model_type {config.get('model_type')!r}"
    if any(name.endswith(".hidden_norm.weight") for name in own) and "fc.weight" in own:
        return None
    if "fc.weight" in own and layers:
        return "an EAGLE-1 or EAGLE-2 head, which reads one hidden state"
    return f"no drafter, model_type {config.get('model_type')!r}"


def features(header: dict[str, Any]) -> int:
    """Return the number of values that the drafter's `fc` reads per row: hidden size times captured layers.

    header: has to contain `fc`.
    """
    return next(t.shape[-1] for name, t in header.items() if name.removeprefix("model.") == "fc.weight")


def make_spec(config: dict, names: Collection[str], num_hidden_layers: int, overrides: dict[str, Any]) -> MTPSpec:
    """Return a drafter's MTPSpec; ValueError for an unsupported head, d2t without an LM head, or other overrides.

    overrides: may set feedback, fuse, and capture, the numbers of layers after which the target is read, 0 to
    num_hidden_layers; capture and feedback are else from config.json, fuse is "eh". ValueError for numbers out of
    range, TypeError for some of a wrong type.
    """
    if not _option(config, "use_aux_hidden_state", True):
        raise ValueError("use_aux_hidden_state=false: allowed is true, a head that reads layers of the target")
    if unknown := sorted(overrides.keys() - {"capture", "feedback", "fuse"}):
        raise ValueError(f"mtp_overrides: drafters have no {unknown[0]!r}; allowed are capture, feedback, fuse")
    capture = overrides["capture"] if "capture" in overrides else _captured_layers(config, num_hidden_layers)
    capture = checked_layers(capture, num_hidden_layers)
    paths = [place[1] for name in names if (place := SPEC.locate(name, 0))]
    if "d2t" in paths and "head.weight" not in paths:
        raise ValueError("tensor lm_head.weight is missing; d2t requires the drafter's own LM head")
    feedback = "post" if _option(config, "norm_output", False) else "pre"
    changes = {name: value for name, value in overrides.items() if name != "capture"}
    return replace(SPEC.resolve(paths), capture=capture, feedback=feedback).override(changes)


def _captured_layers(config: dict, num_hidden_layers: int) -> tuple[int, ...]:
    """Return the numbers of layers after which the target is read; by default 2, the middle, and the last but three.

    `eagle_config` (SGLang) has layer indices, one less; the top level (vLLM) has these numbers.
    """
    if counts := config.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(counts)
    if outputs := (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids"):
        return tuple(i + 1 for i in outputs)
    return 2, num_hidden_layers // 2, num_hidden_layers - 3


def _option(config: dict, name: str, default: bool) -> bool:
    return (config.get("eagle_config") or {}).get(name, config.get(name, default))


def make_head(spec: MTPSpec, config: dict, names: Collection[str], captured: int) -> EagleHead:
    """Return the module for these tensors, before loading.

    names: of the drafter's tensors. captured: the target's hidden_size. For a config.json that does not fit them
    ValueError, or, from missing or invalid values, KeyError, TypeError, AttributeError or ZeroDivisionError.
    """
    normal = normalize(_layer_config(config))
    normal.check(Path("config.json"))
    layer = normal.config
    module = importlib.import_module(f"mlx_lm.models.{layer['model_type']}")
    args = module.ModelArgs.from_dict(layer)
    sliding = layer["layer_types"][0] == "sliding_attention"
    vocab, known = args.vocab_size, config.get("draft_vocab_size") or args.vocab_size
    own = {name.removeprefix("model.").partition(".")[0] for name in names}
    if known < vocab and "d2t" not in own:
        raise ValueError(f"tensor d2t is missing; it maps the LM head's {known} tokens to the vocabulary of {vocab}")
    head = EagleHead(
        spec,
        module.TransformerBlock(args),
        own & {"input_norm", "fc_norm", "d2t"},
        captured=captured,
        vocab=vocab,
        draft_vocab=known,
        window=layer.get("sliding_window") if sliding else None,
        residual_normed=_option(config, "norm_before_residual", False),
    )
    apply_rope(head, layer)
    return head


def _layer_config(config: dict) -> dict:
    """Return the drafter's config as that of a one-layer model of mlx-lm's; ValueError for unsupported layers."""
    layer = {**config, **config.get("transformer_layer_config", {})}
    for name, allowed in (("num_hidden_layers", 1), ("hidden_act", "silu")):
        if layer.get(name, allowed) != allowed:
            raise ValueError(f"{name}={layer[name]!r}: allowed is {allowed!r}")
    if layer.get("model_type") not in LAYERS:
        layer["model_type"] = LAYERS[0]
    layer["head_dim"] = layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"]
    layer["layer_types"] = layer.get("layer_types") or ["full_attention"]
    return {"tie_word_embeddings": False, "rope_theta": 10000.0, "max_position_embeddings": 2048, **layer}
