"""Build a port's model from a checkpoint's tensors, and check that all are there, of the right shape, and trained.

A drafter of a directory of its own takes the place of heads.
"""

import copy
import json
import re
import warnings
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args, get_type_hints

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import infer_quant_config

from ..decoding.memory_needs import Budget
from ..layers.block_drafter import BlockNetwork
from ..layers.mtp_spec import MTPSpec
from ..layers.port import Port
from ..machine.errors import first_line, one_line
from ..models import drafter_kinds
from ..models.config.normalize import normalize
from ..models.config.rope_modules import apply_rope
from ..ranks.group import Ranks
from ..ranks.split import split
from .block_drafter import attach_block
from .check_files import check_complete
from .files import MOST_LAYERS, Header, dequantized, read_header, read_tensors, resolve, weights_apart
from .head_self_test import blaming_config
from .heads_beside import is_split
from .norm_conventions import conventions, warn_of_unusual
from .parameters import check_numbers, expected, named, origin, same
from .quant_methods import refuse_packed
from .read_parts import read_parts
from .report import make_report, with_heads
from .sort_tensors import Contents, Drafting, check_experts, check_types, sort_tensors

EXPERT = re.compile(r"\.experts\.\d+\.")  # of which one is like the others
NO_NUMBERS = str, bool, dict  # of JSON's types; a list may hold a number's values by layer, and null mean none
Raw = tuple[bool, bool]  # whether the trunk's norms, and the heads', are stored zero-centred
CANNOT = "the model cannot be built from it"
MISBUILT = TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError, ValueError


def load_port(
    port: ModuleType,
    path: Path,
    config: dict,
    drafting: Drafting,
    budget: Budget,
    ranks: Ranks | None = None,
    *,
    lazy: bool,
) -> Any:
    """Build a port's model with the heads or the drafter that are asked for, and its report; ValueError if damaged.

    lazy: weights stay on disk; their names, shapes and the norms are checked. Else those of heads wait in
    `model.runtime.untested` to be read, and what is expanded is so when it is used.
    """
    model, contents, raw = read_port(port, path, config, drafting)
    if ranks:
        split(model, ranks.group, config["model_type"])
        model.runtime.ranks = ranks
    stored = _stored(model, contents)
    expanded = _expand_experts(model)
    if not lazy:
        with blaming_config(path):
            budget.check(model, path)
        heads = {name: stored.pop(name) for name in list(stored) if name.startswith("mtp.")}
        if ranks:
            read_parts(model, contents, ranks, stored)
        check_numbers(stored, partial(origin, model, contents))
        model.runtime.untested = partial(_read_heads, model, contents, heads)
    check_norms(model, contents, raw)
    source, ignored = contents.source, contents.ignored
    if drafting.draft_model is not None:
        source, unused = attach_drafter(model, drafting.draft_model, drafting.mtp_overrides)
        _tie(model)
        ignored += unused
    shifted = raw[bool(contents.depths)]
    norms = "shifted by +1 while loading (stored zero-centred)" if shifted else "as stored (already shifted)"
    facts: dict[str, Any] = {"source": source, "norms": norms, "ignored": ignored, "expanded": expanded}
    model.runtime.report = make_report(model, config, ranks=ranks.size if ranks else 1, **facts)
    if 0 < contents.depths < (model.report.declared or 0) and not drafting.mtp_overrides:
        found = f"tensors of {contents.depths} MTP heads found, config.json declares {model.report.declared}"
        warnings.warn(f"{path}: {found}", stacklevel=4)
    return model


def read_port(port: ModuleType, path: Path, config: dict, drafting: Drafting) -> tuple[Any, Contents, Raw]:
    """Build a port's model with parameters that are read and computed when they are used.

    Returns (the model, what the checkpoint holds, which norms are stored zero-centred). Raises ValueError.
    """
    args = read_args(port, path, config)
    normalize(config).warn(path / "config.json", stacklevel=5)
    contents = sort_tensors(port, path, args.num_hidden_layers, drafting)
    refuse_packed(path, config, contents.heads | ({} if contents.alone else contents.trunk))
    check_types(contents.heads)
    raw = conventions(port.Model.ZERO_CENTRED, contents.trunk, contents.heads, alone=contents.alone)
    classes = partial(_build, port, path, contents, raw, config), SimpleNamespace(from_dict=lambda merged: args)
    options: Any = {"model_config": config | contents.overrides(config), "get_model_classes": lambda config: classes}
    with one_line(f"{path}: cannot be loaded", keep=True), weights_apart(path) as apart:
        model, _ = mlx_lm_utils.load_model(apart, lazy=True, strict=False, **options)
    del model.sanitize, model.load_weights  # what loads later, as adapters, is not a checkpoint
    return model, contents, raw


def read_args(port: ModuleType, path: Path, config: dict) -> Any:
    """Make the port's ModelArgs of a normalised config.json; ValueError names what is wrong with it."""
    normalize(config).check(path / "config.json")
    try:
        args = port.ModelArgs.from_dict(copy.deepcopy(config))
        if not isinstance(args.num_hidden_layers, int):
            raise TypeError(f"num_hidden_layers is {args.num_hidden_layers!r}, expected an integer")
    except (TypeError, KeyError, AttributeError, ValueError) as e:
        raise ValueError(f"{path}/config.json: {first_line(e)}") from e
    with one_line(f"{path}/config.json: {CANNOT}"):
        for part in (args, *filter(is_dataclass, vars(args).values())):
            _check_types(part)
    return args


def _check_types(args: Any) -> None:
    """Raise TypeError, which names field and value, where a dataclass of mlx-lm's has no number for one."""
    hints = get_type_hints(type(args))
    for field in fields(args):
        kinds, value = get_args(hints[field.name]) or (hints[field.name],), getattr(args, field.name)
        if not {int, float} & {*kinds} or value is field.default or type(value) in kinds:
            continue
        if isinstance(value, NO_NUMBERS):
            raise TypeError(f"{field.name} is {value!r}, expected {'a number' if float in kinds else 'an integer'}")


def _build(port: ModuleType, path: Path, contents: Contents, raw: Raw, config: dict, args: Any) -> nn.Module:
    """Make the model that mlx-lm fills, with checks in place of its ways to rename and load tensors."""
    with one_line(f"{path}/config.json: {CANNOT}", MISBUILT):
        model = port.Model(args, contents.depths, contents.spec)
        apply_rope(model, config)
    _check_trunk(model, contents, path)
    model.sanitize = partial(_sanitize, model, contents, path, raw)
    model.load_weights = partial(_load_checked, model, contents, path)
    return model


def _check_trunk(model: Any, contents: Contents, path: Path) -> None:
    """Raise for what is missing, of a wrong type, or would be dropped in silence."""
    if not contents.alone:
        check_complete(model, contents)
        check_types(contents.trunk)
        check_experts(path, contents.trunk)
    _check_names(model, contents)


def _check_names(model: Any, contents: Contents) -> None:
    """Raise for a trunk tensor that mlx-lm would drop in silence, such as a layer that config.json denies."""
    modules = {path.rpartition(".")[0] for path in named(model)}
    known: set[str] = set()
    for name, tensor in contents.trunk.items():
        if (alike := EXPERT.sub(".experts.0.", name)) in known:
            continue
        known.add(alike)
        if not any(path.rpartition(".")[0] in modules for path in model.renamed(name)):
            layers = model.args.num_hidden_layers
            expects = f"config.json expects {layers} layers, and MTP heads {model.spec.place(layers)}"
            raise ValueError(f"{tensor.file}: tensor {name} is not part of the model; {expects}")


def _sanitize(model: Any, contents: Contents, path: Path, raw: Raw, weights: dict) -> dict:
    """Do what mlx-lm asks for with what it found by name, which is nothing: hand the port the trunk's and the heads'
    tensors."""
    wanted = {} if contents.alone else contents.trunk
    stored = read_tensors(wanted | contents.heads)  # no name is in both
    trunk = dequantized({name: stored[name] for name in wanted}, wanted)
    heads = dequantized({name: stored[name] for name in contents.heads}, contents.heads)
    try:
        return model.sanitized(trunk, heads, shift_trunk=raw[0], shift_heads=raw[1])
    except KeyError as e:  # mlx-lm takes for granted what it stacks or splits
        ((file, raw_name),) = expected(model, contents, path, [str(e.args[0])])
        raise ValueError(f"{file}: tensor {raw_name} is missing; the rest of its layer needs it") from None


def _load_checked(
    model: nn.Module, contents: Contents, path: Path, weights: list[Any], *, note: str = "", **_: Any
) -> None:
    """Do as `nn.Module.load_weights`, with errors that name file, tensor, expected and found, and end in `note`."""
    parameters, found = _stored(model, contents), dict(weights)
    for name, array in parameters.items():
        if name not in found:
            ((file, raw),) = expected(model, contents, path, [name])
            raise ValueError(f"{file}: tensor {raw} is missing; config.json expects it with shape {array.shape}")
        if found[name].shape != array.shape:
            file, raw = origin(model, contents, name)
            shapes = f"shape {found[name].shape}; config.json expects {array.shape}"
            raise ValueError(f"{file}: tensor {raw} has {shapes}{note}")
    for name in found:
        if name not in parameters:
            file, raw = origin(model, contents, name)
            raise ValueError(f"{file}: tensor {raw} is not part of the model that config.json describes")
    nn.Module.load_weights(model, weights, strict=False)


def _expand_experts(model: nn.Module) -> bool:
    """Make a half-precision model with unquantized experts float32 on a CPU, where MLX multiplies no others."""
    half = any(type(m) is SwitchLinear and m.weight.dtype != mx.float32 for m in model.modules())
    if expanded := half and mx.default_device() == mx.cpu:
        model.set_dtype(mx.float32)
    return expanded


def _read_heads(model: Any, contents: Contents, stored: dict[str, Any]) -> None:
    """Read the heads' weights, as stored, and check them; drop what repeats the target's. ValueError if damaged."""
    check_numbers(stored, partial(origin, model, contents))
    _tie(model)
    model.runtime.report = with_heads(model.report, model)


def check_vectors(model: Any, contents: Contents) -> None:
    """Raise for NaN in vectors, which are small, and where a head's are nothing but zeros."""
    vectors = {name: array for name, array in _stored(model, contents).items() if array.ndim < 2}
    check_numbers(vectors, partial(origin, model, contents))


def check_norms(model: Any, contents: Contents, raw: Raw) -> None:
    """Warn of norms that look unshifted, shifted twice, or of two conventions."""
    if model.ZERO_CENTRED is not None:
        warn_of_unusual(_stored(model, contents), raw, partial(origin, model, contents))


def _stored(model: nn.Module, contents: Contents) -> dict[str, Any]:
    """Pick the parameters that come from the checkpoint: all, unless the heads alone are wanted."""
    return {name: array for name, array in named(model).items() if name.startswith("mtp.") or not contents.alone}


def _tie(model: Any) -> None:
    """Drop a head's own embedding or LM head where it only repeats the target's."""
    for head in model.mtp:
        for name, shared in (("head", model.language.get("lm_head")), ("embed_tokens", model.model.embed_tokens)):
            if name in head and shared is not None and same(named(head[name]), named(shared)):
                head.pop(name)


def attach_drafter(model: Any, path_or_hf_repo: str | Path, overrides: dict[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Give `model` the drafter as its one head; returns (where it came from, tensors that are not used).

    Raises ValueError for a directory that holds no drafter, or one for another target.
    """
    path = resolve(path_or_hf_repo)
    layers, size = model.args.num_hidden_layers, model.model.norm.weight.size
    _, drafter, contents = _open_drafter(path, layers, size, overrides)
    if isinstance(drafter.mtp[0], BlockNetwork):
        return attach_block(model, drafter, contents, path), contents.ignored
    check_numbers(named(drafter), partial(origin, drafter, contents))
    _check_drafter_fits(model, drafter.mtp[0], path)
    drafter.set_dtype(model.model.norm.weight.dtype)
    drafter.eval()
    model.spec, model.mtp = drafter.spec, drafter.mtp
    return f"{path}, reading the target after layers {', '.join(map(str, model.spec.capture))}", contents.ignored


class DrafterAlone(nn.Module):
    """Stand in for a model whose only part is its one head, a drafter."""

    ZERO_CENTRED = None
    RENAMED = ()
    renamed, unrenamed = Port.renamed, Port.unrenamed

    def __init__(self, spec: MTPSpec, head: nn.Module):
        super().__init__()
        self.spec, self.args, self.layers = spec, SimpleNamespace(num_hidden_layers=0), range(1)
        self.mtp = [head]


def open_drafter(path: Path) -> tuple[dict, DrafterAlone, Contents]:
    """Open a drafter without a target, no array computed: (config.json, the model that it is, its tensors)."""
    config, drafter, contents = _open_drafter(path, MOST_LAYERS, None, {})
    spelled = tuple(pair for pair in contents.spec.tensors if any(f"{pair[0]}." in f"{n}." for n in contents.heads))
    drafter.spec = replace(contents.spec, tensors=spelled)
    return config, drafter, contents


def _open_drafter(path: Path, layers: int, size: int | None, overrides: dict) -> tuple[dict, DrafterAlone, Contents]:
    """Build a drafter for a target of `layers` layers and `size` features (None: its own), no array computed."""
    config, header, kind = _read_drafter(path)
    ignored = tuple(sorted(name for name in header if name.endswith(kind.IGNORED)))
    header = {name: tensor for name, tensor in header.items() if name not in ignored}
    try:
        spec = kind.make_spec(config, header.keys(), layers, overrides)
        size = size or kind.features(header) // len(spec.capture)
        head = kind.make_head(spec, config, header.keys(), size)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as e:
        raise ValueError(
            f"{path}/config.json: no drafter can be built from it ({type(e).__name__}: {first_line(e)})"
        ) from e
    except ValueError as e:
        raise ValueError(f"{path}: {first_line(e)}") from e
    drafter, contents = DrafterAlone(spec, head), Contents({}, header, 1, str(path), ignored, spec)
    _load_drafter(drafter, contents, path, f" (its target has {len(spec.capture)} x {size} features)")
    return config, drafter, contents


def is_drafter(path: Path) -> bool:
    """Tell whether a directory holds a drafter, of a kind here or mlx-vlm's MTP heads."""
    with suppress(ValueError, OSError):
        return is_split(path) or bool(_read_drafter(path))
    return False


def _read_drafter(path: Path) -> tuple[dict, Header, ModuleType]:
    """Return a drafter's config.json, its tensors and the module of its kind; ValueError where it is none."""
    kinds, reason, file = drafter_kinds(), None, path / "config.json"
    accepted = f"a drafter is {', or '.join(kind.ACCEPTED for kind in kinds)}"
    if not file.exists():
        raise ValueError(f"{file}: not found; {accepted}")
    with one_line(f"{file}: not valid JSON", (ValueError, RecursionError, OSError)):
        config = json.loads(file.read_text())
    if not isinstance(config, dict):
        raise ValueError(f"{file}: expected an object")
    files = sorted(path.glob("*.safetensors"))
    if not files and list(path.glob("*.bin")):
        raise ValueError(f"{path}: its weights are in PyTorch's .bin format; save them as model.safetensors first")
    if not files:
        raise ValueError(f"{path}: no *.safetensors in it; {accepted}")
    header = read_header(files)
    for kind in kinds:
        if (refusal := kind.refuses(config, header.keys())) is None:
            return config, header, kind
        reason = reason or refusal
    raise ValueError(f"{path}: {reason}; {accepted}")


def _load_drafter(model: DrafterAlone, contents: Contents, path: Path, note: str) -> None:
    """Fill the module with the tensors; each of both must have its partner, of the same shape."""
    weights, names = {}, {}
    check_types({name: tensor for name, tensor in contents.heads.items() if not name.endswith("d2t")})
    with one_line(f"{path}: its tensors cannot be read", (RuntimeError,)):
        stored = read_tensors(contents.heads)
    for name, tensor in contents.heads.items():
        if model.spec.locate(name, 0) is None:
            raise ValueError(f"{tensor.file}: tensor {name} belongs to no part of a drafter")
        (at,) = model.renamed(name)
        if at in names:
            raise ValueError(f"{tensor.file}: tensors {names[at]} and {name} are the same one")
        weights[at], names[at] = stored[name], name
    packed = {at.removesuffix(".scales") for at in weights if at.endswith(".scales")}
    nn.quantize(model, class_predicate=lambda at, m: at in packed and infer_quant_config(at, m, weights))
    _load_checked(model, contents, path, list(weights.items()), note=note)


def _check_drafter_fits(model: Any, head: Any, path: Path) -> None:
    """Raise where tokens or embeddings of drafter and target do not match."""
    size, own, vocab_size = model.model.norm.weight.size, head.norm.weight.size, model.args.vocab_size
    if own != size and not {"embed_tokens", "head"} <= head.keys():
        needed = "an embedding and an LM head of its own"
        raise ValueError(f"{path}: hidden_size {own} needs {needed}; the target's is {size}")
    if "embed_tokens" in head and (rows := head.embed_tokens.weight.shape[0]) < vocab_size:
        raise ValueError(f"{path}: made for {rows} tokens, the target has {vocab_size}")
    if "head" in head:
        tokens = head.token(mx.arange(head.head.weight.shape[0]))
        low, high = tokens.min().item(), tokens.max().item()
        if low < 0 or high >= vocab_size:
            raise ValueError(f"{path}: drafts tokens {low} to {high}, the target has 0 to {vocab_size - 1}")
