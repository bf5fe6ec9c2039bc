"""Normalise the rotary embeddings of config.json into the fields that a family's dataclass reads.

transformers 4 writes `rope_theta` and `rope_scaling`; transformers 5 writes `rope_parameters`, which contains both,
for all layers or for each layer type. If a file has both forms and they disagree, theta and the rotated part come
from `rope_parameters` and the scaling from `rope_scaling`, as in transformers.
"""

import math
from typing import Any

Config = dict[str, Any]
THETA = ("rope_theta", "rotary_emb_base", "rope_base", "rope_freq_constant", "rope_embedding_base", "theta")
LOCAL_THETA = ("rope_local_base_freq", "swa_rope_theta", "rope_local_theta")  # of sliding-window layers
PARTIAL = ("partial_rotary_factor", "rotary_pct")
KEYS = {"rope_parameters", "rope_scaling", *THETA, *LOCAL_THETA, *PARTIAL}
FULL, SLIDING = "full_attention", "sliding_attention"
RENAMED_TYPES = {"su": "longrope"}
# Types of scaling, and the keys that MLX's modules read for each.
LENGTH = "original_max_position_embeddings"
YARN = {"factor", LENGTH, "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"}
TYPES = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "alpha"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", LENGTH},
    "yarn": YARN,
    "deepseek_yarn": YARN,
    "telechat3-yarn": YARN,
    "longrope": {"short_factor", "long_factor", "short_mscale", "long_mscale", "factor", "attention_factor", LENGTH},
    "proportional": {"factor"},
    "mrope": {"mrope_section"},
}
ALWAYS = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
ALWAYS |= {"llama_4_scaling_beta", "finetuned", "max_position_embeddings", LENGTH}
HAVE_LENGTH = {"llama3", "yarn", "longrope"}


class RopeConfig:
    """Rotary embeddings of a config: `kinds` maps a layer type, or "" for all layers, to its parameters."""

    def __init__(self, config: Config):
        parameters, scaling = (_object(config, name) for name in ("rope_parameters", "rope_scaling"))
        self.nested = any(isinstance(value, dict) for value in parameters.values())
        layers = {name: value for name, value in parameters.items() if isinstance(value, dict)}
        self.stated = bool(parameters or scaling) or any(config.get(name) is not None for name in (*THETA, *PARTIAL))
        self.kinds = {
            kind: _parameters(config, given, scaling if kind in ("", FULL) else {})
            for kind, given in (layers if self.nested else {"": parameters}).items()
        }

    @property
    def main(self) -> Config:
        """Parameters of all or of full-attention layers; if neither is stated, of the first layer type."""
        return self.kinds.get("") or self.kinds.get(FULL) or next(iter(self.kinds.values()))

    @property
    def local(self) -> Config:
        """Parameters of sliding-window layers; the main ones unless they are stated separately."""
        return self.kinds.get(SLIDING, self.main)

    def unread(self) -> list[str]:
        """Return the sorted keys, of all layer types, that MLX's module for the type of scaling does not read."""
        names = (name for p in self.kinds.values() for name in p if name not in ALWAYS | TYPES[p["rope_type"]])
        return sorted(set(names))


def write(config: Config, fields: set[str]) -> tuple[Config, dict[str, Any]]:
    """Return (a config's rotary values under names in `fields`, the values, by name, that no such field can hold).

    Both are empty if the config states no rotary embedding. ValueError as of `RopeConfig`: for an unknown type of
    scaling, or values of the wrong kind or that MLX's modules cannot have.
    """
    rope, found, unsupported = RopeConfig(config), {}, {}
    if not rope.stated:
        return {}, {}
    main, local = rope.main, rope.local
    if "rope_parameters" in fields:
        found["rope_parameters"] = rope.kinds if rope.nested and "rope_theta" not in fields else main
        if found["rope_parameters"] is rope.kinds:
            return found, {}
    theta, local_theta = main.get("rope_theta"), local.get("rope_theta")
    if not rope.nested:
        local_theta = next((config[name] for name in LOCAL_THETA if config.get(name) is not None), None)
    for names, value in ((THETA, theta), (LOCAL_THETA, local_theta)):
        found |= {name: value for name in names if name in fields and value is not None}
    if theta is not None and not found.keys() & {*THETA, "rope_parameters"}:
        unsupported["rope_theta"] = theta
    if local_theta not in (None, theta) and not fields & {*LOCAL_THETA}:
        unsupported[f"{SLIDING}.rope_theta"] = local_theta
    if "rope_scaling" in fields:
        found["rope_scaling"] = main if scaled(main) else None
    if scaled(local) and local is not main and _scaling(local) != _scaling(main):
        unsupported[f"{SLIDING}.rope_scaling"] = local["rope_type"]
    if LENGTH in fields and LENGTH in main and config.get(LENGTH) is None:
        found[LENGTH] = main[LENGTH]
    return found | _partial(config, main, local, fields, unsupported), unsupported


def scaled(parameters: Config) -> bool:
    """Return whether the parameters, with a normalised `rope_type`, scale positions or frequencies."""
    return parameters.get("rope_type", "default") not in ("default", "mrope")


def usual(config: Config) -> Config | None:
    """Return the rotary parameters of a family's default config in transformers, with theta; None if it has none.

    config: that default config. Theta is 10,000 if it states none. {} is a family that transformers lacks, and gives
    this theta alone.
    """
    parameters = config.get("rope_parameters") or {}
    if config and not parameters:
        return None
    return {"rope_theta": 10000.0, **parameters}


def _object(config: Config, name: str) -> Config:
    value = config.get(name)
    if not isinstance(value, dict | None):
        raise ValueError(f"{name} is {value!r}, expected an object")
    return value or {}


def _parameters(config: Config, given: Config, scaling: Config) -> Config:
    """Return one layer type's parameters: values inside `rope_parameters` (`given`) merged with those next to it.

    scaling: `rope_scaling`. A null counts as absent. ValueError for an unknown type of scaling, or factors of
    longrope or YaRN that MLX's modules cannot have.
    """
    inside = {n: v for n, v in given.items() if v is not None and not isinstance(v, dict)}
    scaling = {n: v for n, v in scaling.items() if v is not None}
    merged = {**inside, **scaling, **{n: inside[n] for n in ("rope_theta", "partial_rotary_factor") if n in inside}}
    of_type = scaling if scaling.keys() & {"rope_type", "type"} else inside
    kind = of_type.get("rope_type") or of_type.get("type") or "default"
    kind = RENAMED_TYPES.get(kind, kind)
    if kind not in TYPES:
        raise ValueError(f"rope_scaling: type {kind!r} is unknown; allowed are {', '.join(TYPES)}")
    merged |= {"rope_type": kind, "type": kind}
    for name, names in (("rope_theta", THETA), ("partial_rotary_factor", PARTIAL)):
        outer = next((config[n] for n in names if config.get(n) is not None), None)
        if outer is not None:
            merged.setdefault(name, outer)
    if kind in HAVE_LENGTH:
        length = config.get(LENGTH) or merged.get(LENGTH) or config.get("max_position_embeddings")
        merged |= {LENGTH: length} if length else {}
        if "factor" not in merged and kind == "yarn" and length:
            merged["factor"] = config["max_position_embeddings"] / length
    if kind == "longrope":
        _check_longrope(merged, config.get("max_position_embeddings"))
    return _with_mscale(merged) if kind == "yarn" else merged


def _check_longrope(parameters: Config, longest: int | None) -> None:
    """Raise ValueError unless longrope's factors are those that MLX's module derives from the two context lengths.

    Without one of the lengths nothing is checked.
    """
    length = parameters.get(LENGTH)
    if length and longest:
        factor = longest / length
        usual = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
        stated = parameters.get("attention_factor", usual)
        if abs(stated - usual) > 1e-6 or abs(parameters.get("factor", factor) / factor - 1) > 1e-6:
            needed = f"factor {factor:g}, attention_factor {usual:g}"
            raise ValueError(f"rope_scaling: longrope of these lengths needs {needed}")


def _with_mscale(parameters: Config) -> Config:
    """Return YaRN's parameters with the `mscale` from which MLX's module computes their factor on queries and keys.

    The factor is `attention_factor`; else the ratio of `mscale` and `mscale_all_dim` if both are set; else it follows
    from the scaling factor. ValueError for an attention_factor other than 1 without a factor above 1.
    """
    factor, both = parameters.get("factor", 1), ("mscale", "mscale_all_dim")
    scales = [bool(parameters.get(name)) for name in both]
    if "attention_factor" not in parameters and scales[0] == scales[1]:
        return parameters
    step = 0.1 * math.log(max(factor, 1))
    stated = parameters.get("attention_factor", step + 1)
    if not step:
        if stated != 1:
            raise ValueError(f"rope_scaling: attention_factor={stated} needs a factor above 1")
        return parameters
    mscale = (stated * (step * parameters.get("mscale_all_dim", 0) + 1) - 1) / step
    # attention_factor is set too, so that a second pass computes the same mscale.
    return {**parameters, "mscale": mscale, "attention_factor": stated}


def _scaling(parameters: Config) -> Config:
    return {name: value for name, value in parameters.items() if name != "rope_theta"}


def _partial(config: Config, main: Config, local: Config, fields: set[str], unsupported: dict[str, Any]) -> Config:
    """Return the rotated share of a head under names in `fields`, `rotary_dim` as a number of features.

    Empty if the main layers state none, which is a share of 1. A share of the local layers that differs is added
    to `unsupported`.
    """
    part, other = main.get("partial_rotary_factor"), local.get("partial_rotary_factor")
    if (1 if other is None else other) != (1 if part is None else part):
        unsupported[f"{SLIDING}.partial_rotary_factor"] = other
    if part is None:
        return {}
    found = {name: part for name in PARTIAL if name in fields}
    if "rotary_dim" in fields and config.get("rotary_dim") is None:
        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        found["rotary_dim"] = int(size * part)
    return found
