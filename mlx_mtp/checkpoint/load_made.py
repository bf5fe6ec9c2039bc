"""Load a family without a port as mlx-lm's own model, which drafts if a probe allows it; convert it with mlx-lm."""

import contextlib
import io
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import convert as mlx_lm_convert

from ..decoding.memory_needs import Budget
from ..layers.blocks import place_blocks
from ..layers.made import Plain, as_target
from ..layers.made_form import CLOSE, distance
from ..layers.noted import ModuleCall, note, noting, unnote
from ..layers.scaled import scale_outputs
from ..machine import atomic
from ..machine.errors import one_line
from ..models import find_family, port_names
from ..models.config.normalize import normalize
from ..models.config.rope_modules import apply_rope
from ..ranks.group import Ranks
from ..ranks.split import split
from .build import attach_drafter, attach_new_head
from .cure import NeverDrafts
from .files import fill_model, read_config, read_tensors
from .head_self_test import FEW_TOKENS, random_tokens
from .packed.arrays import read_arrays
from .packed.contents import recognize
from .packed.modules import Packed
from .packed.sanitize import sanitized
from .parameters import check_codes, check_numbers, named
from .probe import probe
from .quant_methods import packed_by
from .report import Report, make_report
from .sort_tensors import OF_ACTIVATIONS, Drafting
from .weight_files import StoredTensors, read_stored

UNTESTED = "whether it drafts is decided by a test of its weights when they are read"


def load_made(
    path: Path,
    config: dict,
    drafting: Drafting,
    budget: Budget,
    ranks: Ranks | None = None,
    *,
    lazy: bool,
    drafter: Path | None = None,
) -> Any:
    """Return mlx-lm's own model with its report: `Made` if a probe shows that it can draft, else `Plain`.

    Warns that a `Plain` one decodes without drafts, unless mtp=False. lazy: neither the memory nor the weights are
    checked, nor are weights read, and the model is `Plain`. ranks: split the model over them. drafter: directory of
    an external drafter to attach that is no small model. ValueError for options of heads, an unknown model_type, a
    damaged checkpoint, a model that cannot be split, or too little memory, or a drafter that does not fit the model.
    """
    name, why = config["model_type"], UNTESTED
    if drafting.mtp_overrides and drafter is None:
        lacks = f"the target's model_type {name!r} has no port with heads; supported are {', '.join(port_names())}"
        raise ValueError(f"mtp_overrides={drafting.mtp_overrides}: omit it; {lacks}")
    ignored: list[str] = []
    parts: list[tuple[Any, list[ModuleCall]]] = []
    with one_line(f"{path}: cannot be loaded", keep=True):
        model = _build(path, config, ", ".join(port_names()), ignored)
        if ranks:
            split(model, ranks.group, name, None if lazy else partial(_note_parts, model, parts))
            model.runtime.ranks = ranks
        if not lazy:
            budget.check(model, path)
            check_numbers(named(model), lambda name: (path, name))
            check_codes(model, lambda name: (path, name), heads=False)
            if ranks:
                _check_sums(model, name, parts)
            why = probe(model)
    source = f"model_type {name!r} has no MTP port"
    for option, value in (("draft_model", drafting.draft_model), ("mtp_path", drafting.mtp_path)):
        if why and value:
            raise ValueError(f"{option}={value}: omit it; model_type {name!r} decodes plainly: {why}")
    if drafter is not None or drafting.mtp_path:
        source, unused = _attached(model, name, drafting, drafter)
        ignored += unused
        budget.check(model, path)
    elif drafting.mtp and not drafting.draft_model:
        warnings.warn(f"{path}: {source}; {_without_drafts(why)}", NeverDrafts, stacklevel=4)
    facts = {"source": source, "norms": "mlx-lm's", "ignored": tuple(ignored), "port": _port_of(model, why)}
    model.runtime.report = make_report(model, config, ranks=ranks.size if ranks else 1, **facts)
    return model


def _attached(model: Any, name: str, drafting: Drafting, drafter: Path | None) -> tuple[str, tuple[str, ...]]:
    """Attach the head in the file `mtp_path`, or a drafter; return its source and the names of its unused tensors."""
    if model.form.no_streams:
        raise ValueError(
            f"{drafter or drafting.mtp_path}: model_type {name!r} has no streams: {model.form.no_streams}"
        )
    if drafter is not None:
        return attach_drafter(model, drafter, drafting.mtp_overrides)
    assert drafting.mtp_path
    return attach_new_head(model, Path(drafting.mtp_path)), ()


def _without_drafts(why: str | None) -> str:
    """Return, for a warning, what a model without a drafter does. why: of `probe`, or UNTESTED."""
    if why is None:
        return "no drafts without --prompt-lookup (Python: prompt_lookup=True), which copies them from the text"
    return why if why == UNTESTED else f"decoding plainly, with mlx-lm's own model: {why}"


def _note_parts(model: Any, found: list[tuple[Any, list[ModuleCall]]], parts: list[Any]) -> None:
    """Append modules of a model with their calls in a pass of a few tokens, all lazy."""
    for part in parts:
        note(part)
    with noting(parts) as calls:
        model(mx.array([random_tokens(model.vocab_size)[:FEW_TOKENS]]))
    for part in parts:
        unnote(part)
    found += zip(parts, calls, strict=True)


def _check_sums(model: Any, name: str, parts: list[tuple[Any, list[ModuleCall]]]) -> None:
    """Raise ValueError, on every rank, unless modules return what they did with mlx-lm's own sums over the ranks."""
    outputs = [(part(*call.args, **call.options), call.output) for part, calls in parts for call in calls]
    same = [distance(*each) <= CLOSE for each in outputs]  # NaN is no distance
    if [0] in model.ranks.gather([int(all(same) and all(calls for _, calls in parts))]):
        why = "cannot be split: its attention or MLP returns other values if summed at its end; allowed is 1"
        raise ValueError(f"ranks={model.ranks.size}: model_type {name!r} {why}")


def _port_of(model: Any, why: str | None) -> str:
    """Return the report's line of a model's port; why: None for a `Made` one."""
    if why is not None:
        return f"none: {why}" if why == UNTESTED else f"none: decoded plainly, {why}"
    levels = "tokens" if model.form.no_streams else "tokens, streams"
    form, alone = model.form, model.runtime.alone
    facts = {"no streams": form.no_streams, "no batches": alone, "no kv_bits": form.no_bits}
    facts["no trees"] = form.no_trees
    missing = "".join(f"; {what}: {reason}" for what, reason in facts.items() if reason)
    return f"made of mlx-lm's model: {levels}{missing}"


def _build(path: Path, config: dict, ports: str, ignored: list[str]) -> Any:
    """Return mlx-lm's model with lazy weights, and append the names of unused tensors to `ignored`.

    ports: supported families, for messages. ValueError for an unknown model_type or quantization method.
    """
    if (family := find_family(config)) is None:
        reason = f"model_type {config['model_type']!r} is unknown; known are {ports} and mlx-lm's"
        raise ValueError(f"{path}/config.json: {reason}")
    stored = read_stored(path)
    packed = recognize(path, config, stored.trunk, stored)
    overrides = {"quantization": {"group_size": 64, "bits": 4}, "quantization_config": {}} if packed else {}

    def build(args: Any) -> Any:
        model = as_target(Plain, family.Model)(args)
        apply_rope(model, config)
        model.sanitize = partial(_sanitize, model, stored, packed)
        model.load_weights = partial(_load_weights, model, stored, ignored)
        return model

    normal = normalize(config)
    normal.check(path / "config.json")
    normal.warn(path / "config.json", stacklevel=5)
    try:
        model = fill_model(path, config | overrides, build, family.ModelArgs.from_dict(config))
    except (ValueError, KeyError) as e:
        reason = packed_by(path, config, stored.trunk) or (isinstance(e, KeyError) and stored.lacking())
        if reason:
            raise ValueError(reason) from e
        raise
    model.vocab_size = model(mx.zeros((1, 1), mx.int32)).shape[-1]  # nothing is computed
    return model


def _sanitize(
    model: Any, stored: StoredTensors, packed: dict[str, Packed], weights: dict[str, mx.array]
) -> dict[str, mx.array]:
    """Return the checkpoint's tensors as parameters of mlx-lm's model, lazy; the argument `weights` is ignored.

    The model's modules that are stored in block formats are replaced to load them.
    """
    parts = {name for module, weight in packed.items() for name in weight.raw(module)}
    unused = OF_ACTIVATIONS if packed else ()
    plain = {n: tensor for n, tensor in stored.trunk.items() if n not in parts and not n.endswith(unused)}
    weights = read_tensors(plain)
    own = getattr(type(model), "sanitize", lambda _, tensors: tensors)
    made = sanitized(lambda arrays: own(model, weights | arrays), read_arrays(packed), model, weights)
    place_blocks(model, made)
    return made


def _load_weights(
    model: Any, stored: StoredTensors, ignored: list[str], weights: list[tuple[str, mx.array]], **_: Any
) -> None:
    """Load weights as `nn.Module.load_weights`; ValueError for a missing parameter. Warn of unneeded files.

    Names of weights that are no parameters are appended to `ignored`.
    """
    found = dict(weights)
    scale_outputs(model, found)
    expected = named(model)
    if missing := sorted(expected.keys() - found.keys()):
        unnamed = f"{stored.path}: tensor {missing[0]} is missing; config.json expects it"
        raise ValueError(stored.lacking(missing) or unnamed)
    stored.warn(stacklevel=8)
    ignored += sorted(found.keys() - expected.keys())
    nn.Module.load_weights(model, [(n, w) for n, w in weights if n in expected], strict=True)


def check_no_heads(path: Path, **options: Any) -> None:
    """Raise ValueError if an option of the heads is not None. path: a checkpoint of a family without a port."""
    for name, value in options.items():
        if value is not None:
            family = read_config(path)["model_type"]
            raise ValueError(f"{name}={value}: leave it out; model_type {family!r} has no MTP heads here")


def convert_plain(path: Path, new: Path, **options: Any) -> tuple[int, Report]:
    """Write a conversion by mlx-lm to the new directory `new`; return its safetensors files' bytes, and its report.

    options: those of `mlx_lm.convert`, None for its default. A failed conversion leaves no files. ValueError, one
    line, if it cannot convert the checkpoint.
    """
    given = {name: value for name, value in options.items() if value is not None}
    with atomic.directory(new) as folder:
        written = folder / "converted"
        known = (ValueError, RuntimeError, KeyError, TypeError)
        with one_line(f"{path}: mlx-lm cannot convert it", known), contextlib.redirect_stdout(io.StringIO()):
            mlx_lm_convert(str(path), str(written), **given)
        for file in written.iterdir():
            file.rename(folder / file.name)
        written.rmdir()
        drafting = Drafting(False, None, {}, None)
        report = load_made(folder, read_config(folder), drafting, Budget(ignore=True), lazy=True).runtime.report
    return sum(file.stat().st_size for file in new.glob("*.safetensors")), report
