"""Load a family without a port: mlx-lm's own model and caches, for plain decoding in the same loop."""

import importlib
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils

from ..cache.layer_cache import CacheKind
from ..cache.mlx_lm_caches import MlxLmCaches
from ..decoding.memory_needs import Budget
from ..layers.runtime import HasRuntime, Runtime
from ..machine.errors import one_line
from ..models import port_names
from ..models.config.normalize import normalize
from ..models.config.rope_modules import apply_rope
from .files import read_tensors, without_weights
from .parameters import check_numbers, named
from .quant_methods import packed_by
from .report import make_report
from .sort_tensors import Drafting
from .weight_files import Stored, read_stored


class Plain(HasRuntime):
    """Mixin in front of mlx-lm's Model: the part of a port's contract that needs no knowledge of the model."""

    mtp: tuple = ()
    max_draft_tokens = 0
    NO_KV_BITS = "a family that has no port"
    vocab_size: int

    def __init__(self, args: Any):
        super().__init__(args)  # type: ignore[call-arg]
        self.runtime = Runtime()

    def windows(self) -> list[CacheKind]:
        return [MlxLmCaches]

    def head_windows(self) -> list[int | None]:
        return []

    def no_hidden(self) -> mx.array:
        return mx.zeros((1, 1, self.vocab_size))

    def hidden(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """Compute logits [1, 1, V] of the last of tokens [1, L], which is all that plain decoding asks for."""
        return cache[0].read(self, tokens)

    def logits(self, hidden: mx.array) -> mx.array:
        return hidden

    def choice(self, hidden: mx.array) -> None:
        """Return None: `hidden` is the logits."""


def load_plain(path: Path, config: dict, drafting: Drafting, budget: Budget, *, lazy: bool) -> Any:
    """Load mlx-lm's own model, make its report, and warn that nothing is drafted; ValueError if damaged."""
    name, known = config["model_type"], ", ".join(port_names())
    for option in ("draft_model", "mtp_path", "mtp_overrides"):
        if value := getattr(drafting, option):
            raise ValueError(f"{option}={value}: model_type {name!r} has no port that drafts; ports are {known}")
    ignored: list[str] = []
    with one_line(f"{path}: cannot be loaded", keep=True):
        model = _build(path, config, known, ignored)
        if not lazy:
            budget.check(model, path)
            check_numbers(named(model), lambda name: (path, name))
    source = f"model_type {name!r} has no MTP port"
    model.runtime.report = make_report(model, config, source=source, norms="mlx-lm's", ignored=tuple(ignored))
    if drafting.mtp:
        warnings.warn(f"{path}: {source}; decoding plainly, with mlx-lm's own model", stacklevel=4)
    return model


def _build(path: Path, config: dict, ports: str, ignored: list[str]) -> Any:
    """Build mlx-lm's model, its weights not read; tensors that it does not know are appended to `ignored`."""
    name = config["model_type"]
    try:
        family = importlib.import_module(f"mlx_lm.models.{mlx_lm_utils.MODEL_REMAPPING.get(name, name)}")
    except ModuleNotFoundError:
        raise ValueError(
            f"{path}/config.json: model_type {name!r} is unknown; known are {ports} and mlx-lm's"
        ) from None
    stored = read_stored(path)

    def build(args: Any) -> Any:
        kind: Any = type("Model", (Plain, family.Model), {})
        model = kind(args)
        apply_rope(model, config)
        model.sanitize = partial(_sanitize, model, stored)
        model.load_weights = partial(_load_weights, model, stored, ignored)
        return model

    normal = normalize(config)
    normal.check(path / "config.json")
    normal.warn(path / "config.json", stacklevel=5)
    args = SimpleNamespace(from_dict=lambda merged: family.ModelArgs.from_dict(config))
    classes: Any = (build, args)
    options: Any = {"model_config": config, "get_model_classes": lambda config: classes}
    try:
        with without_weights(path) as apart:
            model, _ = mlx_lm_utils.load_model(apart, lazy=True, strict=False, **options)
    except (ValueError, KeyError) as e:
        reason = packed_by(path, config, stored.trunk) or (isinstance(e, KeyError) and stored.lacking())
        if reason:
            raise ValueError(reason) from e
        raise
    del model.sanitize, model.load_weights  # what loads later, as adapters, is not a checkpoint
    model.vocab_size = model(mx.zeros((1, 1), mx.int32)).shape[-1]  # its shape only: nothing is computed
    return model


def _sanitize(model: Any, stored: Stored, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Do what mlx-lm asks for with what it found by name, which is nothing, with the trunk's tensors."""
    weights = read_tensors(stored.trunk)
    return type(model).sanitize(model, weights) if hasattr(type(model), "sanitize") else weights


def _load_weights(
    model: Any, stored: Stored, ignored: list[str], weights: list[tuple[str, mx.array]], **_: Any
) -> None:
    """Do as `nn.Module.load_weights`, but name what is missing and skip what the model has no place for."""
    expected, found = named(model), dict(weights)
    if missing := sorted(expected.keys() - found.keys()):
        unnamed = f"{stored.path}: tensor {missing[0]} is missing; config.json expects it"
        raise ValueError(stored.lacking(missing) or unnamed)
    stored.warn(stacklevel=7)
    ignored += sorted(found.keys() - expected.keys())
    nn.Module.load_weights(model, [(n, w) for n, w in weights if n in expected], strict=True)
