"""Build a model of a released shape with random weights: for times, not for texts.

No module is ever held in full precision: MLX builds modules lazily, and each is replaced by random bits of its
quantized size. Such a model routes almost evenly, so several rows visit more experts than on real text, and a
mixture's verify has its maximum cost.
"""

import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..checkpoint import build
from ..checkpoint.files import DECLARED, checked_config
from ..checkpoint.report import make_report
from ..machine.errors import one_line
from ..models import find_port, port_names
from ..models.config.rope_modules import apply_rope

UNDECLARED = {"recycle": 1, "chain": 3, "target_each": 3}  # heads of families whose config.json lacks their number
UNQUANTIZED = 16  # bits
MISBUILT = (*build.MISBUILT, AssertionError)
INDICES = re.compile(r"\d+(,\d+)*")  # a list of layers as text


def random_model(file: Path, *, seed: int = 0, **shape: Any) -> Any:
    """Build a port's model of a config.json with random weights; shape: options of `shaped_model`, such as bits.

    Raises the ValueErrors of `shaped_model` and `draw_weights`.
    """
    mx.random.seed(seed)  # for vectors that mlx-lm draws
    model, config = shaped_model(file, **shape)
    draw_weights(model, seed)
    model.eval()
    model.runtime.report = make_report(model, config, source="random weights", norms="ones", ignored=())
    return model


def shaped_model(
    file: Path, *, layers: int | None = None, bits: int | None = None, group_size: int | None = None, mtp: bool = True
) -> tuple[Any, dict]:
    """Build a port's model of a config.json without computing arrays; also return the config, cut to its layers.

    layers: keep only this number of first layers (None: all). mtp: with the heads of `head_count`, else none.
    bits, group_size: None uses the file's `quantization`, else 4 and 64. With 16 bits weights have the precision of
    activations: float32 on a CPU, else bfloat16. Bits of single modules follow the file, or mlx-lm's rules for the
    family.
    Raises a one-line ValueError for an unreadable file, a family without a port, or invalid sizes.
    """
    try:
        with one_line(f"{file}: not valid JSON", (ValueError, RecursionError)):
            config = json.loads(file.read_text())
    except OSError as e:
        raise ValueError(f"{file}: cannot be read ({e.strerror})") from None
    port = find_port(config := checked_config(config, file))
    if port is None:
        names = ", ".join(port_names())
        raise ValueError(f"{file}: model_type {config['model_type']!r} has no port; allowed are {names}")
    config = config if layers is None else first_layers(config, layers)
    heads = head_count(config, port.Model.SPEC) if mtp else 0
    stated: dict = config.get("quantization") or {}
    bits, group_size = bits or stated.get("bits", 4), group_size or stated.get("group_size", 64)
    with one_line(f"{file}: no model can be built from it", MISBUILT):
        model = port.Model(build.read_args(port, file, config), heads, port.Model.SPEC.resolve(()))
        apply_rope(model, config)
        model.set_dtype(mx.float32 if mx.default_device() == mx.Device(mx.cpu) else mx.bfloat16)
        if bits != UNQUANTIZED:
            rule = partial(_rule, getattr(model, "quant_predicate", None), stated, group_size)
            nn.quantize(model, group_size, bits, class_predicate=rule)
    return model, config


def head_count(config: dict, spec: Any) -> int:
    """Return the number of heads in config.json, at most the family's usual number, which is the default.

    0 for a family without heads.
    """
    if not spec.tensors:
        return 0
    text, usual = config.get("text_config", config), UNDECLARED[spec.topology]
    return min(usual, next((text[name] for name in DECLARED if name in text), usual))


def first_layers(config: dict, layers: int) -> dict:
    """Return a copy of a config.json with only its first layers, and its heads; ValueError for a wrong number."""
    text = config.get("text_config", config)
    total = text.get("num_hidden_layers")
    if not isinstance(total, int) or not 0 < layers <= total:
        allowed = f"1 to {total}, the number in config.json" if total else "none, config.json lacks num_hidden_layers"
        raise ValueError(f"layers={layers}: allowed is {allowed}")
    cut = {name: _first(name, value, layers, total) for name, value in text.items()}
    cut["num_hidden_layers"] = layers
    return {**config, "text_config": cut} if "text_config" in config else cut


def _first(name: str, value: Any, layers: int, total: int) -> Any:
    """Return an entry of config.json, cut if it has one item or letter per layer, or is a text of layer indices.

    Items after those of the `total` layers, the heads', are kept.
    """
    if isinstance(value, str) and INDICES.fullmatch(value):
        kept = [i for i in value.split(",") if int(i) < layers]
        return ",".join(kept or [str(10 * total)])  # no layer has this number; an empty list would mean the default
    if isinstance(value, list) or (isinstance(value, str) and name.endswith("pattern")):
        ends: Any = value[:layers], value[total:]
        return ends[0] + ends[1] if len(value) >= max(total, 2) else value
    return value


def _rule(of_family: Any, stated: dict, group_size: int, path: str, module: Any) -> bool | dict:
    """Return whether a module is quantized, and how: as config.json states, else as mlx-lm converts the family.

    False if its rows are not whole groups of `group_size`; True, the default format, if they are not whole groups of
    the size that is stated for this module.
    """
    if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group_size:
        return False
    chosen = of_family(path, module) if of_family and path not in stated else stated.get(path, True)
    fits = not isinstance(chosen, dict) or module.weight.shape[-1] % chosen["group_size"] == 0
    return chosen if fits else True


def draw_weights(model: Any, seed: int) -> None:
    """Replace every matrix by random weights of variance 1 / inputs, in place, evaluated one module at a time.

    Vectors and convolutions keep mlx-lm's values: norms ones, biases zeros, decay rates its own. Raises ValueError
    for a quantization mode other than affine.
    """
    keys = mx.random.split(mx.random.key(seed), sum(1 for _ in model.named_modules()))
    for key, (_, module) in zip(keys, model.named_modules(), strict=True):
        if "scales" in module:  # random codes 0 .. 2^bits - 1, times a scale, minus their mean
            if module.mode != "affine":
                raise ValueError(f"quantization mode {module.mode!r}: random weights support only affine")
            scale = math.sqrt(12 / (module.scales.shape[-1] * module.group_size * (4**module.bits - 1)))
            *rows, words = module.weight.shape
            module.weight = mx.random.randint(0, 2**16, (*rows, 2 * words), mx.uint16, key=key).view(mx.uint32)
            shape, mean = module.scales.shape, scale * (2**module.bits - 1) / 2
            module.scales, module.biases = (mx.full(shape, x, module.scales.dtype) for x in (scale, -mean))
        elif not isinstance(module, nn.Conv1d):
            for name, a in [(n, a) for n, a in module.items() if isinstance(a, mx.array) and a.ndim > 1]:
                module[name] = mx.random.normal(a.shape, a.dtype, scale=a.shape[-1] ** -0.5, key=key)
        mx.eval([a for a in module.values() if isinstance(a, mx.array)])
