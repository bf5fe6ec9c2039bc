"""Load a family without a port: mlx-lm's own model and caches in the same loop, without drafts."""

import importlib
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils

from ..cache.layer_cache import CacheKind
from ..cache.mlx_lm_caches import MlxLmCaches
from ..decoding.memory_needs import Budget
from ..machine.errors import one_line
from ..models import port_names
from .files import trunk_header
from .parameters import check_numbers, named
from .report import make_report
from .sort_tensors import Drafting


class Plain:
    """Mixin in front of mlx-lm's Model: the part of a port's contract that needs no knowledge of the model."""

    mtp: tuple = ()
    max_draft_tokens = 0
    NO_KV_BITS = "a family that has no port"
    vocab_size: int

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
        model = _build(path, name, known, ignored)
        if not lazy:
            budget.check(model, path)
            mx.eval(model.parameters())
            check_numbers(named(model), lambda name: (path, name))
    source = f"model_type {name!r} has no MTP port"
    model.report = make_report(model, config, source=source, norms="mlx-lm's", ignored=tuple(ignored))
    if drafting.mtp:
        warnings.warn(f"{path}: {source}; decoding plainly, with mlx-lm's own model", stacklevel=4)
    return model


def _build(path: Path, name: str, ports: str, ignored: list[str]) -> Any:
    """Build mlx-lm's model, its weights not read; tensors that it does not know are appended to `ignored`."""
    try:
        family = importlib.import_module(f"mlx_lm.models.{mlx_lm_utils.MODEL_REMAPPING.get(name, name)}")
    except ModuleNotFoundError:
        raise ValueError(
            f"{path}/config.json: model_type {name!r} is unknown; known are {ports} and mlx-lm's"
        ) from None
    trunk_header(path)  # for what is wrong with the files: MLX itself looks less closely

    def build(args: Any) -> Any:
        kind: Any = type("Model", (Plain, family.Model), {})
        model = kind(args)
        model.load_weights = partial(_load_weights, model, path, ignored)
        return model

    classes: Any = (build, family.ModelArgs)
    model, _ = mlx_lm_utils.load_model(path, lazy=True, strict=False, get_model_classes=lambda config: classes)
    del model.load_weights  # what loads later, as adapters, is not a checkpoint
    model.vocab_size = model(mx.zeros((1, 1), mx.int32)).shape[-1]  # its shape only: nothing is computed
    return model


def _load_weights(model: Any, path: Path, ignored: list[str], weights: list[tuple[str, mx.array]], **_: Any) -> None:
    """Do as `nn.Module.load_weights`, but name what is missing and skip what the model has no place for."""
    expected, found = named(model), dict(weights)
    if missing := sorted(expected.keys() - found.keys()):
        raise ValueError(f"{path}: tensor {missing[0]} is missing; config.json expects it")
    ignored += sorted(found.keys() - expected.keys())
    nn.Module.load_weights(model, [(n, w) for n, w in weights if n in expected], strict=True)
