"""Accept block drafters: DFlash, DFlash2 and DSpark, for the target of any port.

config.json is in one of three forms. z-lab's and DSpark's have the drafter's keys in `dflash_config` or at the top
level, speculators' the layers in `transformer_layer_config`, and transformers' assistants tensors under `encoder.`.
Sources: z-lab/dflash, transformers `muse_glimmer_assistant`, speculators `models/dflash*` and `models/dspark`.
"""

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

from ..layers.block_drafter import BlockNetwork, BlockShape
from ..layers.block_mask import Reach
from ..layers.block_parts import MarkovHead
from ..layers.mtp_spec import MTPSpec, checked_layers, pairs
from .config.rope import RopeConfig, scaled

ACCEPTED = (
    "a block drafter (DFlash, DFlash2, DSpark): a directory with config.json and *.safetensors that hold fc, "
    "hidden_norm (or encoder.fc, encoder.output_norm_enc), layers.0 and more, and norm"
)
JOINS_HEADS = True  # drafts next to the target's MTP heads
IGNORED = ("t2d", "rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")
CODEBOOKS = tuple(f"candidate_selector.{name}_codebook" for name in ("predecessor", "successor"))
NAMED_CODEBOOKS = tuple((f"{name}.weight", name) for name in CODEBOOKS)  # as others convert them
ENCODER = (("encoder.fc", "fc"), ("encoder.output_norm_enc", "hidden_norm"))
SPEC = MTPSpec(
    capture=(),  # set from config.json
    head="shared_or_own",
    embedding="shared_or_own",
    prefix=r"(?:model\.)?",
    numbered="zero",
    tensors=ENCODER
    + NAMED_CODEBOOKS
    + pairs(
        "fc hidden_norm layers norm candidate_selector markov_head confidence_head embed_tokens d2t lm_head=head"
    ),
)
SPECULATORS = "speculators_model_type"
KINDS = ("dflash", "dflash2", "dspark")
LARGEST = 1 << 24  # of numbers in config.json
MOST_LAYERS, LONGEST = 1000, 1 << 17  # of a drafter; a window's rows are allocated at once
LAYERS = ("full_attention", "sliding_attention")
FOREIGN = ("layer_scalar", "pre_feedforward_layernorm", "attention_sink_bias", "self_attn.sinks")


def refuses(config: dict, names: Collection[str]) -> str | None:
    """Return None if a config.json or tensor names are a block drafter's, else a phrase for the error."""
    own = {name.removeprefix("model.") for name in names}
    declared = [config.get(SPECULATORS), config.get("model_type"), *_list(config.get("architectures"))]
    kinds = ("dflash", "dspark", "muse_glimmer_assistant")
    named = any(kind in str(name).lower() for kind in kinds for name in declared)
    fused = any({f"{name}.weight" for name in pair} <= own for pair in zip(*ENCODER, strict=True))
    if not (named or fused or "dflash_config" in config):
        return f"no block drafter, model_type {config.get('model_type')!r}"
    return None


def features(header: dict[str, Any]) -> int:
    """Return the number of values that the drafter's `fc` reads per row: hidden size times captured layers.

    ValueError if the tensor is missing.
    """
    ends = ("fc.weight", "encoder.fc.weight")
    for name, tensor in header.items():
        if name.removeprefix("model.") in ends:
            return tensor.shape[-1]
    raise ValueError("tensor fc.weight is missing")


def make_spec(config: dict, names: Collection[str], num_hidden_layers: int, overrides: dict[str, Any]) -> MTPSpec:
    """Return a block drafter's MTPSpec; ValueError for unsupported layers, d2t without an LM head, other overrides.

    overrides: may set capture, the numbers of layers after which the target is read, 0 to num_hidden_layers; the
    default is config.json's. ValueError for numbers that are out of range or missing, TypeError for some of a wrong
    type.
    """
    if unknown := sorted(overrides.keys() - {"capture"}):
        raise ValueError(f"mtp_overrides: block drafters have no {unknown[0]!r}; allowed is capture")
    capture = checked_layers(overrides["capture"] if "capture" in overrides else _taps(config), num_hidden_layers)
    for name in sorted(names):
        if any(part in name for part in FOREIGN):
            raise ValueError(f"a block drafter with layers of another kind, which have {name}; supported are Qwen3's")
    paths = [place[1] for name in names if (place := SPEC.locate(name, 0))]
    if "d2t" in paths and "head.weight" not in paths:
        raise ValueError("tensor lm_head.weight is missing; d2t requires the drafter's own LM head")
    own = {name.removeprefix("model.") for name in names}
    other = ENCODER if not any(name.startswith("encoder.") for name in own) else [("fc", "fc"), ("hidden_norm",) * 2]
    other = [*other, *(pair for pair in NAMED_CODEBOOKS if pair[0] not in own)]
    spelled = tuple(pair for pair in SPEC.tensors if pair not in other)  # messages name what this form has
    return replace(SPEC.resolve(paths), capture=capture, tensors=spelled)


def make_head(spec: MTPSpec, config: dict, names: Collection[str], captured: int) -> BlockNetwork:
    """Return the network for these tensors, before loading.

    names: of the drafter's tensors. captured: the target's hidden_size. For a config.json that does not fit them
    ValueError or, from entries that are no objects, TypeError or AttributeError.
    """
    own = {name.removeprefix("model.").partition(".")[0].replace("lm_head", "head") for name in names}
    layer = _layer_config(config)
    size = partial(_number, layer)
    vocab, width, heads = size("vocab_size"), size("hidden_size"), size("num_attention_heads")
    known, kv_heads = _number(config, "draft_vocab_size", vocab), size("num_key_value_heads", heads)
    head_dim = size("head_dim", max(1, width // heads))
    if heads % kv_heads or head_dim % 2:
        found = f"num_attention_heads={heads}, num_key_value_heads={kv_heads}, head_dim={head_dim}"
        raise ValueError(f"{found}: expected heads to be a multiple of KV heads, and an even head_dim")
    if known < vocab and "d2t" not in own:
        raise ValueError(f"tensor d2t is missing; it maps the LM head's {known} tokens to the vocabulary of {vocab}")
    rope = RopeConfig({"rope_theta": 10000.0, **layer}).main
    shape = BlockShape(
        hidden_size=width,
        captured=captured,
        intermediate_size=size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=_real(layer, "rms_norm_eps", 1e-6),
        vocab=vocab,
        draft_vocab=known,
        taps=spec.capture,  # type: ignore[arg-type] - numbers of layers
        mask_token=_token(config, vocab),
        reaches=_reaches(config, layer, assistant="encoder" in own),
        rope_theta=_theta(rope),
        rope=rope if scaled(rope) else None,
        positions=size("max_position_embeddings", 2048),
        interleaved=not _option(config, "rope_is_neox_style", True),
        bias=bool(layer.get("attention_bias")),
        layers=_option(config, "num_target_layers"),
        frozen_embedding=SPECULATORS in config,
        **_variant(config, own),
    )
    if vocab != known and shape.selector:
        raise ValueError(f"draft_vocab_size={known}: allowed is {vocab}, because the selector scores all tokens")
    return BlockNetwork(shape, own & {"embed_tokens", "head", "d2t"})


def _variant(config: dict, own: set[str]) -> dict[str, Any]:
    """Return BlockShape's fields for drafts per cycle, scales and softcap, and DFlash2's and DSpark's parts.

    own: first parts of the names of the drafter's tensors. ValueError for unsupported values.
    """
    spark = "markov_head" in own or config.get(SPECULATORS) == "dspark"
    anchored, size = bool(_option(config, "sample_from_anchor", spark)), _number(config, "block_size", 16)
    counts_drafts = anchored or (spark and SPECULATORS not in config)
    drafts = size - (not counts_drafts or bool(_option(config, "dspark_bonus_anchor", False)))
    if drafts < 1:
        raise ValueError(f"block_size={size}: no drafts; allowed is {size + 1 - drafts} or more")
    found: dict[str, Any] = {"drafts": drafts, "anchored": anchored}
    found["softcap"] = _real(config, "final_logit_softcapping", None)
    found["scale"] = _real(config, "output_multiplier", 1.0)
    found["embed_scale"] = _real(config, "input_embedding_scale", 1.0)
    if "candidate_selector" in own or _kind(config) == "dflash2":
        found["conv"] = _number(config, "conv_kernel_size", 2), _number(config, "conv_group_size", 16)
        found["selector"] = _number(config, "selector_rank", 256), _number(config, "selector_top_k", 16)
        width = _number(_layer_config(config), "hidden_size")
        if width % found["conv"][1]:
            raise ValueError(f"conv_group_size={found['conv'][1]}: allowed are divisors of hidden_size {width}")
    if spark and _option(config, "markov_rank", 256):
        kind = _option(config, "markov_head_type", "vanilla")
        if kind not in MarkovHead.KINDS:
            raise ValueError(f"markov_head_type={kind!r}: allowed are {', '.join(MarkovHead.KINDS)}")
        found["markov"] = kind, _number(config, "markov_rank", 256)
    found["confidence"] = "confidence_head" in own or bool(_option(config, "enable_confidence_head", False))
    found["with_markov"] = bool(_option(config, "confidence_head_with_markov", True))
    return found


def _reaches(config: dict, layer: dict, *, assistant: bool) -> tuple[Reach, ...]:
    """Return one Reach per drafter layer, what it attends to; config.json's three forms differ.

    layer: config.json with the layers' keys. assistant: whether the form is that of transformers' assistants.
    ValueError for other layer types, or for sliding ones with a window that is missing or not in 2 to LONGEST.
    """
    count = _number(layer, "num_hidden_layers", most=MOST_LAYERS)
    window = _option(config, "swa_window_size", layer.get("sliding_window"))
    kinds = layer.get("layer_types") or [LAYERS[assistant]] * count
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in LAYERS for kind in kinds):
        raise ValueError(f"layer_types={kinds}: allowed are {count} of {', '.join(LAYERS)}")
    if LAYERS[1] in kinds and not (type(window) is int and 1 < window <= LONGEST):
        name = "sliding_window" if _option(config, "swa_window_size") is None else "swa_window_size"
        raise ValueError(f"{name}={window!r}: allowed are 2 to {LONGEST:,}, for sliding_attention")
    causal = _option(config, "causal", _option(config, "is_causal", config.get("dflash_query_causal")))
    if assistant:
        full, sliding = Reach(), Reach(window, bounded=True)
    elif SPECULATORS in config:
        both_ways = config.get("sliding_window_non_causal", _kind(config) == "dflash2")
        full, sliding = Reach(), Reach(window, from_anchor=True, causal=not both_ways)
    else:
        one_way = _kind(config) != "dflash2" if causal is None else bool(causal)
        sliding = Reach(window - 1 if LAYERS[1] in kinds else None, causal=one_way)
        full = Reach(causal=bool(causal))
    return tuple(full if kind == LAYERS[0] else sliding for kind in kinds)


def _kind(config: dict) -> str:
    """Return the one of KINDS that a config.json declares; DFlash if none."""
    declared = " ".join(map(str, [config.get(SPECULATORS), *_list(config.get("architectures"))])).lower()
    return next((kind for kind in reversed(KINDS) if kind in declared), KINDS[0])


def _taps(config: dict) -> tuple[int, ...]:
    """Return the numbers of layers after which the target is read, from 1 for its first layer.

    speculators' config.json has these numbers, the others the indices of layers, one less. If there are neither, the
    numbers are spread evenly over the target's num_target_layers layers; ValueError without that number.
    """
    if SPECULATORS in config:
        return tuple(config.get("aux_hidden_state_layer_ids") or ())
    if ids := _option(config, "target_layer_ids"):
        return tuple(i + 1 for i in ids)
    layers = _option(config, "num_target_layers")
    count = _number(_layer_config(config), "num_hidden_layers", most=MOST_LAYERS)
    if layers is None:
        raise ValueError("target_layer_ids is missing; add the list of the layers at which the target is read")
    spread = (layers - 4) / max(count - 1, 1)  # as the trainer's default: from layer 1 to the last but two
    return tuple(round(1 + i * spread) + 1 for i in range(count)) if count > 1 else (layers // 2 + 1,)


def _theta(rope: dict) -> float:
    theta = rope.get("rope_theta", 10000.0)
    if type(theta) not in (int, float) or not 0 < theta < float("inf"):
        raise ValueError(f"rope_theta={theta!r}: allowed are positive numbers")
    return float(theta)


def _token(config: dict, vocab: int) -> int:
    token = _option(config, "mask_token_id")
    if type(token) is not int or not 0 <= token < vocab:
        raise ValueError(f"mask_token_id={token!r}: allowed are 0 to {vocab - 1}")
    return token


def _layer_config(config: dict) -> dict:
    """Return config.json with the layers' keys at the top level; ValueError for layers that are not supported."""
    layer = {**config, **(config.get("transformer_layer_config") or {})}
    for name, allowed in (("hidden_act", "silu"), ("attention_sink_bias", False)):
        if (value := _option(layer, name, allowed)) != allowed:
            raise ValueError(f"{name}={value!r}: allowed is {allowed!r}")
    return layer


def _option(config: dict, name: str, default: Any = None) -> Any:
    found = (config.get("dflash_config") or {}).get(name, config.get(name))
    return default if found is None else found


def _number(config: dict, name: str, default: int | None = None, most: int = LARGEST) -> int:
    value = _option(config, name, default)
    if type(value) is not int or not 0 < value <= most:
        raise ValueError(f"{name}={value!r}: allowed are positive integers up to {most:,}")
    return value


def _real(config: dict, name: str, default: float | None) -> Any:
    value = _option(config, name, default)
    if value is not None and (type(value) not in (int, float) or not abs(value) < LARGEST):
        raise ValueError(f"{name}={value!r}: allowed are numbers between -{LARGEST:,} and {LARGEST:,}")
    return value


def _list(value: Any) -> list:
    return value if isinstance(value, list) else []
