"""Build a port's model from a checkpoint, and check that each tensor is present, has the right shape and is trained.

An external drafter, from a directory of its own, replaces the checkpoint's MTP heads, unless it is a block drafter.
"""

import copy
import warnings
from dataclasses import fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args, get_type_hints

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.utils import infer_quant_config

from ..decoding.memory_needs import Budget
from ..layers.block_drafter import BlockNetwork
from ..layers.blocks import place_blocks
from ..layers.expert_rows import cut_experts, number_rows
from ..layers.mtp_head import MTPHead
from ..layers.mtp_spec import MTPSpec
from ..layers.port import Port
from ..layers.scaled import scale_outputs
from ..layers.shared_rope import share_angles
from ..layers.with_heads import TUNED
from ..machine.errors import first_line, one_line
from ..models.config.normalize import normalize
from ..models.config.rope_modules import apply_rope
from ..ranks.group import Ranks
from ..ranks.split import split
from .block_drafter import attach_block, counted
from .check_files import check_complete
from .files import MAX_LAYERS, fill_model, read_header, read_tensors, resolve
from .find_drafter import check_drafter_fits, read_drafter
from .head_self_test import naming_config
from .norm_conventions import conventions, warn_of_unusual
from .packed.arrays import read_arrays
from .packed.contents import with_packed
from .packed.find import without_scales
from .parameters import check_codes, check_numbers, expected, is_targets, named, origin
from .port_parameters import Raw, parameters_of
from .quant_methods import packed_by
from .read_parts import read_parts
from .report import drafting_bytes, lm_heads, make_report
from .sort_tensors import EXPERT, Contents, Drafting, check_experts, check_types, sort_tensors, without_broken_heads
from .vision import BLIND, Sight, open_vision, vision_facts

NO_NUMBERS = str, bool, dict  # JSON's other types are accepted: a list has one value per layer, null is unset
NO_MODEL = "the model cannot be built from it"
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
    sight: Sight = BLIND,
) -> Any:
    """Return a port's model with its MTP heads or its external drafter, and a report in `model.runtime.report`.

    lazy: read only norms, to warn of unusual ones, and an external drafter; check no memory. Otherwise `budget` is
    checked first, the target's weights are read and checked, and `model.runtime.untested` becomes a function that
    reads and checks the heads' weights. ranks: split the target over them. sight: whether and where to look for a
    vision tower, whose weights are read at the first picture. ValueError if the checkpoint is damaged or too large.
    """
    normalize(config).warn(path / "config.json", stacklevel=4)
    model, contents, raw = without_broken_heads(partial(read_port, port, path, config), drafting)
    if ranks:
        split(model, ranks.group, config["model_type"])
        model.runtime.ranks = ranks
    runtime = model.runtime
    width = model.model.norm.weight.size
    runtime.vision, runtime.blind = open_vision(path, config, contents.stored, sight, width, model.embedded)
    stored = _stored(model, contents)
    expanded = _expand_experts(model)
    opened = None
    if drafting.draft_model is not None:
        found = resolve(drafting.draft_model)
        opened = *_open_drafter(found, len(model.layers), width, drafting.mtp_overrides)[1:], found
    if not lazy:
        with naming_config(path), counted(model, opened and opened[0].mtp[0]):
            budget.check(model, path)
        heads = {name: stored.pop(name) for name in list(stored) if name.startswith("mtp.")}
        if ranks:
            read_parts(model, contents, ranks, stored)
        check_numbers(stored, partial(origin, model, contents))
        check_codes(model, partial(origin, model, contents), heads=False)
        model.runtime.untested = partial(_read_heads, model, contents, heads)
    check_norms(model, contents, raw)
    source, ignored = contents.source, contents.ignored
    if opened:
        source, unused = _attach(model, *opened)
        ignored += unused
    shifted = raw[bool(contents.depths)]
    norms = "shifted by +1 while loading (stored zero-centred)" if shifted else "as stored (already shifted)"
    joined = contents.source if opened and contents.depths else ""
    facts: dict[str, Any] = {"source": source, "heads_source": joined, "norms": norms}
    facts |= vision_facts(config, runtime.vision, runtime.blind, ignored)
    model.runtime.report = make_report(model, config, ranks=ranks.size if ranks else 1, expanded=expanded, **facts)
    if 0 < contents.depths < (model.report.declared or 0) and not drafting.mtp_overrides:
        found = f"tensors of {contents.depths} MTP heads found, config.json declares {model.report.declared}"
        warnings.warn(f"{path}: {found}", stacklevel=4)
    if mx.default_device() == mx.cpu:
        share_angles(model)
    cut_experts(model)
    number_rows(model.modules())
    return model


def read_port(port: ModuleType, path: Path, config: dict, drafting: Drafting) -> tuple[Any, Contents, Raw]:
    """Return (a port's model, the checkpoint's sorted tensors, the parts with zero-centred norms, as in `Raw`).

    The parameters are lazy arrays: they are read when they are used. Raises ValueError for a checkpoint that is
    damaged or packed by an unsupported quantization method.
    """
    args = read_args(port, path, config)
    contents = with_packed(sort_tensors(port, path, args.num_hidden_layers, drafting), path, config)
    if reason := packed_by(path, config, contents.heads | ({} if contents.alone else contents.trunk)):
        raise ValueError(reason)
    check_types(contents.heads)
    named_as_stored = (without_scales(part, contents.packed) for part in (contents.trunk, contents.heads))
    raw = conventions(port.Model.ZERO_CENTRED, *named_as_stored, alone=contents.alone)
    make = partial(_build, port, path, contents, raw, config)
    with one_line(f"{path}: cannot be loaded", keep=True):
        return fill_model(path, config | contents.overrides(config), make, args), contents, raw


def read_args(port: ModuleType, path: Path, config: dict) -> Any:
    """Return the port's ModelArgs for a config.json, which is not modified; ValueError if it does not fit them."""
    normalize(config).check(path / "config.json")
    try:
        args = port.ModelArgs.from_dict(copy.deepcopy(config))
        if not isinstance(args.num_hidden_layers, int):
            raise TypeError(f"num_hidden_layers is {args.num_hidden_layers!r}, expected an integer")
    except (TypeError, KeyError, AttributeError, ValueError) as e:
        raise ValueError(f"{path}/config.json: {first_line(e)}") from e
    with one_line(f"{path}/config.json: {NO_MODEL}"):
        for part in (args, *filter(is_dataclass, vars(args).values())):
            _check_types(part)
    return args


def _check_types(args: Any) -> None:
    """Raise TypeError if a numeric field of a ModelArgs holds a string, a boolean or an object.

    Accepted are the field's default, other types of its annotation, any kind of number, lists and None.
    """
    hints = get_type_hints(type(args))
    for field in fields(args):
        kinds, value = get_args(hints[field.name]) or (hints[field.name],), getattr(args, field.name)
        if not {int, float} & {*kinds} or value is field.default or type(value) in kinds:
            continue
        if isinstance(value, NO_NUMBERS):
            raise TypeError(f"{field.name} is {value!r}, expected {'a number' if float in kinds else 'an integer'}")


def _build(port: ModuleType, path: Path, contents: Contents, raw: Raw, config: dict, args: Any) -> nn.Module:
    """Return a model before loading, whose `sanitize` and `load_weights`, which mlx-lm calls, check the tensors.

    ValueError if config.json describes no model, or the trunk's tensors are incomplete, unknown or of a wrong type.
    """
    with one_line(f"{path}/config.json: {NO_MODEL}", MISBUILT):
        model = port.Model(args, contents.depths, contents.spec)
        apply_rope(model, config)
    if not contents.alone:
        check_complete(model, contents)
        check_types(contents.trunk)
        check_experts(path, contents.trunk)
    _check_names(model, contents)
    model.sanitize = partial(parameters_of, model, contents, path, raw)
    model.load_weights = partial(_load_checked, model, contents, path)
    return model


def _check_names(model: Any, contents: Contents) -> None:
    """Raise ValueError for a trunk tensor that belongs to no module of the model, but for example to a later layer.

    mlx-lm would drop such a tensor.
    """
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


def _load_checked(
    model: nn.Module, contents: Contents, path: Path, weights: list[Any], *, note: str = "", **_: Any
) -> None:
    """Load weights as `nn.Module.load_weights`; ValueError for a missing or unknown tensor, or one of a wrong shape.

    The message names file and tensor. note: the end of the message about a wrong shape; no other message has it.
    """
    found = dict(weights)
    scale_outputs(model, found)
    parameters = _stored(model, contents)
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
    """Convert the whole model to float32 on a CPU if unquantized experts have another type, as MLX requires.

    Return whether it was converted.
    """
    half = any(type(m) is SwitchLinear and m.weight.dtype != mx.float32 for m in model.modules())
    if expanded := half and mx.default_device() == mx.cpu:
        model.set_dtype(mx.float32)
    return expanded


def _read_heads(model: Any, contents: Contents, stored: dict[str, Any]) -> None:
    """Read and check the weights of the MTP heads, and drop embeddings and LM heads that equal the target's.

    Updates `head_bytes` and `lm_head` in the report. Errors and warnings are those of `check_numbers` and
    `check_codes`.
    """
    check_numbers(stored, partial(origin, model, contents))
    check_codes(model, partial(origin, model, contents), heads=True)
    _tie(model)
    model.runtime.note(head_bytes=drafting_bytes(model), lm_head=lm_heads(model.mtp))


def check_vectors(model: Any, contents: Contents) -> None:
    """Raise ValueError for a vector that contains NaN, or a head's vector of zeros; matrices are not read."""
    vectors = {name: array for name, array in _stored(model, contents).items() if array.ndim < 2}
    check_numbers(vectors, partial(origin, model, contents))


def check_norms(model: Any, contents: Contents, raw: Raw) -> None:
    """Warn as `warn_of_unusual`; do nothing for a family whose norms are never stored zero-centred."""
    if model.ZERO_CENTRED is not None:
        warn_of_unusual(_stored(model, contents), raw, partial(origin, model, contents))


def _stored(model: nn.Module, contents: Contents) -> dict[str, Any]:
    """Return the parameters that are read from the checkpoint: all, or the heads' if `contents.alone`."""
    return {name: array for name, array in named(model).items() if name.startswith("mtp.") or not contents.alone}


def _tie(model: Any) -> None:
    """Drop each head's embedding, and LM head, if it equals the target's own, which the head then uses."""
    for head in model.mtp:
        for name in ("head", "embed_tokens"):
            if name in head and is_targets(model, name, head[name]):
                head.pop(name)


def attach_drafter(model: Any, path: Path, overrides: dict) -> tuple[str, tuple[str, ...]]:
    """Load an external drafter from a directory and attach it to its target; return as `_attach`.

    overrides: values that replace its spec's. ValueError if it cannot be built, or does not fit the target.
    """
    _, drafter, contents = _open_drafter(path, len(model.layers), model.width, overrides)
    return _attach(model, drafter, contents, path)


def attach_new_head(model: Any, file: Path) -> str:
    """Load a head of `tune-heads --new` from a file and attach it to a made port; return its source for the report.

    ValueError for a file with other tensors, or a damaged one, or if the port's layers cannot be in a head.
    """
    header = read_header([file]) if file.is_file() else {}
    if not header or not all(TUNED.locate(name, 0) for name in header):
        raise ValueError(f"mtp_path={file}: a family without a port drafts only with a file of tune-heads --new")
    draft_vocab = next((tensor.shape[0] for name, tensor in header.items() if name.endswith(".d2t")), 0)
    spec = replace(TUNED, draft_vocab=draft_vocab)
    head = MTPHead(spec, model.like_last_layer(), model.final_norm, model.vocab_size, mask_array=model.MASK_ARRAY)
    drafter, contents = DrafterAlone(spec, head), Contents({}, header, 1, str(file), (), spec)
    _load_drafter(drafter, contents, file, "")
    check_numbers(named(drafter), partial(origin, drafter, contents))
    drafter.eval()
    model.spec, model.mtp = spec, drafter.mtp
    return str(file)


def _attach(model: Any, drafter: "DrafterAlone", contents: Contents, path: Path) -> tuple[str, tuple[str, ...]]:
    """Attach an opened external drafter; return (its source for the report, names of its unused tensors).

    A block drafter joins the MTP heads, any other one replaces them. Its weights are read. ValueError if they are
    damaged, or do not fit the target.
    """
    if isinstance(drafter.mtp[0], BlockNetwork):
        return attach_block(model, drafter, contents, path), contents.ignored
    check_numbers(named(drafter), partial(origin, drafter, contents))
    check_drafter_fits(model, drafter.mtp[0], path)
    drafter.set_dtype(model.no_hidden().dtype)
    drafter.eval()
    model.spec, model.mtp = drafter.spec, drafter.mtp
    _tie(model)
    return f"{path}, reading the target after layers {', '.join(map(str, model.spec.capture))}", contents.ignored


class DrafterAlone(nn.Module):
    """A model without a target, whose only head is an external drafter."""

    ZERO_CENTRED = None
    RENAMED = ()
    renamed, unrenamed = Port.renamed, Port.unrenamed

    def __init__(self, spec: MTPSpec, head: nn.Module):
        super().__init__()
        self.spec, self.args, self.layers = spec, SimpleNamespace(num_hidden_layers=0), range(1)
        self.mtp = [head]


def open_drafter(path: Path) -> tuple[dict, DrafterAlone, Contents]:
    """Open an external drafter without its target; return (its config.json, model, descriptions of its tensors).

    Weights stay lazy. Raises ValueError if the directory contains no drafter, or a damaged one.
    """
    config, drafter, contents = _open_drafter(path, MAX_LAYERS, None, {})
    names = tuple(pair for pair in contents.spec.tensors if any(f"{pair[0]}." in f"{n}." for n in contents.heads))
    drafter.spec = replace(contents.spec, tensors=names)
    return config, drafter, contents


def _open_drafter(path: Path, layers: int, size: int | None, overrides: dict) -> tuple[dict, DrafterAlone, Contents]:
    """Return (config.json, model, descriptions of its used tensors) of a drafter for a target of `layers` layers.

    Weights stay lazy. size: the target's hidden size; None is the size that the drafter's tensors have. overrides:
    values that replace its spec's. ValueError if there is no drafter, or its files do not fit together.
    """
    config, header, kind, packed = read_drafter(path)
    ignored = tuple(sorted(name for name in header if name.endswith(kind.IGNORED)))
    header = {name: tensor for name, tensor in header.items() if name not in ignored}
    try:
        spec = kind.make_spec(config, header.keys(), layers, overrides)
        whole = {f"{m}.weight": replace(header[f"{m}.weight"], shape=weight.shape) for m, weight in packed.items()}
        size = size or kind.features(header | whole) // len(spec.capture)
        head = kind.make_head(spec, config, header.keys(), size)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as e:
        found = f"{type(e).__name__}: {first_line(e)}"
        raise ValueError(f"{path}/config.json: no drafter can be built from it ({found})") from e
    except ValueError as e:
        raise ValueError(f"{path}: {first_line(e)}") from e
    drafter, contents = DrafterAlone(spec, head), Contents({}, header, 1, str(path), ignored, spec, packed=packed)
    _load_drafter(drafter, contents, path, f" (its target has {len(spec.capture)} x {size} features)")
    return config, drafter, contents


def _load_drafter(model: DrafterAlone, contents: Contents, path: Path, note: str) -> None:
    """Load a drafter's tensors, lazily; ValueError unless they match the parameters one to one in name and shape.

    Modules with scales are quantized before. note: the end of a message about a wrong shape. ValueError also for a
    tensor of a wrong type.
    """
    weights, names = {}, {}
    check_types({name: tensor for name, tensor in contents.heads.items() if not name.endswith("d2t")})
    arrays = {f"{m}.{n}": w for m, a in read_arrays(contents.packed).items() for n, w in a.parameters().items()}
    with one_line(f"{path}: its tensors cannot be read", (RuntimeError,)):
        stored = read_tensors({name: t for name, t in contents.heads.items() if name not in arrays}) | arrays
    for name, tensor in contents.heads.items():
        if model.spec.locate(name, 0) is None:
            raise ValueError(f"{tensor.file}: tensor {name} belongs to no part of a drafter")
        (at,) = model.renamed(name)
        if at in names:
            raise ValueError(f"{tensor.file}: tensors {names[at]} and {name} both become {at}; expected one of them")
        weights[at], names[at] = stored[name], name
    place_blocks(model, weights)
    packed = {at.removesuffix(".scales") for at in weights if at.endswith(".scales")}
    nn.quantize(model, class_predicate=lambda at, m: at in packed and infer_quant_config(at, m, weights))
    _load_checked(model, contents, path, list(weights.items()), note=note)
