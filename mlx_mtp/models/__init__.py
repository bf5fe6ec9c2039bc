"""Find the port of a model_type, and the kinds of external drafters.

A port `mlx_mtp/models/<model_type>.py` defines

- `ModelArgs`: mlx-lm's dataclass of config.json, with `num_hidden_layers`, `vocab_size` and, unless
  NO_KV_BITS, `head_dim`;
- `Model(args, heads=0, spec=None)`: `layers.port.Port` in front of mlx-lm's model, with `heads` MTPHeads, and what of
  these differs from Port's:
    `SPEC`          the family's MTPSpec,
    `replace_modules()`
                    puts layers that roll back their state in the place of mlx-lm's,
    `head_block(depth)`
                    makes the decoder layer inside an MTP head,
    `BASE`          whose `sanitize` is used for the trunk and, layer by layer, for the heads: mlx-lm's Model,
    `RENAMED`       what that sanitizing does to names, for messages that name a checkpoint's own tensors,
    `IGNORED`       tensors that text decoding does not use, named in the load report,
    `ZERO_CENTRED`  names that tell the hub's norms (stored minus one) from converted ones,
    `INSIDE`        where BASE's `sanitize` expects the tensors of a layer, and what `one_layer()` says it is of,
    `MLP`, `ROUTER`, `ATTENTION`, `MOE`, `BLOCK`, `NORM`
                    mlx-lm's modules of a form that kernels can serve whole,
    `MASK_ARRAY`, `NO_KV_BITS`, and `windows()` where layers have windows or states, or no cache
    (then `hidden` is the port's own, and deals the caches out).

What the loop calls (`layers.target.Target`) is Port's. Nothing outside this package knows a family by name.

A drafter in a directory of its own (DRAFTERS) defines instead `refuses(config, names)`, `make_spec(config, names,
num_hidden_layers, overrides)`, `make_head(spec, config, names, captured)`, ACCEPTED and IGNORED.
"""

import importlib
from pathlib import Path
from types import ModuleType

from mlx_lm.utils import MODEL_REMAPPING

DRAFTERS = ("eagle3",)
UNWRAPPED = {
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}  # exports of the text model: flat config.json


def port_names() -> list[str]:
    """List every model_type that has a port."""
    files = {p.stem for p in Path(__file__).parent.glob("*.py")}
    return sorted(files - {"__init__", *DRAFTERS} | UNWRAPPED.keys())


def find_port(config: dict) -> ModuleType | None:
    """Import the port of a config.json's model_type, or of the one that mlx-lm takes it for; None: there is none."""
    name = (MODEL_REMAPPING | UNWRAPPED).get(config["model_type"], config["model_type"])
    return importlib.import_module(f".{name}", __package__) if name in port_names() else None


def drafter_kinds() -> list[ModuleType]:
    """Import every kind of external drafter."""
    return [importlib.import_module(f".{name}", __package__) for name in DRAFTERS]
