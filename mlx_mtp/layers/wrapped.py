"""Make the port of a family of mlx-lm whose Model holds or extends the Model of a family that has a port.

Such a family is recognized by what its Model builds and calls, not by its name. Pictures and sound are not read.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, field, make_dataclass, replace
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from .port import FUSED_EXPERTS, Tensors

INSIDE = "language_model"
PREFIX = f"{INSIDE}."  # of the language model's tensors in mlx-lm's layout
HUB_PREFIX = f"model.{INSIDE}."  # of those in transformers' layout that have "model." in mlx-lm's
MAX_COMPARED = 1 << 16  # numbers of a constant array, such as rotary frequencies
OWN = re.compile(r"(model\.)?language_model\.|model\.(embed_tokens|layers|norm)\.|(lm_head|mtp|tuned_mtp)\.")


class WrappedArgs:
    """Mixin of a port's ModelArgs that reads the config.json of a wrapper, whose module of mlx-lm is FAMILY."""

    respelled = staticmethod(dict)  # mlx-lm's wrapper reads the values as they are

    @classmethod
    def from_dict(cls: Any, params: dict[str, Any]) -> Any:
        language = _built(cls.FAMILY, params)[INSIDE]
        return super().from_dict({**asdict(language.args), "outer": params})  # type: ignore[misc]


class Wrapped:
    """Mixin of a port whose tensors have the names of a wrapper's language model in either layout."""

    PREFIX, OWN = PREFIX, OWN

    def renamed(self, name: str) -> list[str]:
        return super().renamed(_bare(name))  # type: ignore[misc]

    def sanitized(self: Any, trunk: Tensors, heads: Tensors, **shifts: bool) -> Tensors:
        """Convert checkpoint tensors by the wrapper's `sanitize` and then as the port does."""
        wrapper = _built(self.args.FAMILY, self.args.outer)
        made = wrapper.sanitize({PREFIX + _bare(name): w for name, w in trunk.items()})
        return super().sanitized({_bare(name): w for name, w in made.items()}, heads, **shifts)  # type: ignore[misc]


def wrapped_port(family: ModuleType | None, config: dict, find: Callable[[str], Any]) -> ModuleType | None:
    """Return the port of the model that mlx-lm's module `family` holds or extends; None for any other family.

    None also if the family cannot be built from this config.json, or if it changes the inputs, modules or logits of
    the language model that it holds. find: returns the port of a family by its name, None without one.
    """
    if "text_config" not in getattr(getattr(family, "ModelArgs", None), "__dataclass_fields__", ()):
        return None
    try:
        return _recognized(family, json.dumps(config, default=str), find)
    except Exception:  # a config.json that describes no model; the loader reports it
        return None


@lru_cache(8)
def _recognized(family: Any, config: str, find: Callable[[str], Any]) -> ModuleType | None:
    """Return `wrapped_port` of a config.json as text; a load calls it several times."""
    outer = _built(family, json.loads(config))
    language, base = outer[INSIDE], type(outer).__base__
    if (port := find(base.__module__.rpartition(".")[2])) and _extends(outer, sys.modules[base.__module__]):
        args, model = (port.ModelArgs, family.ModelArgs), (port.Model, family.Model)
        return _made(port, family, args, model, rules={"shard": property()})  # mlx-lm would drop their classes
    for part in (language, language.get("model")):
        room, _, name = type(part).__module__.rpartition(".")
        port = find(name) if room == "mlx_lm.models" else None
        if port and _holds(outer, sys.modules[f"{room}.{name}"]):
            return _wrapped(port, family)
    return None


def _bare(name: str) -> str:
    """Return the name that a wrapper's tensor has in the language model alone."""
    return f"model.{name.removeprefix(HUB_PREFIX)}" if name.startswith(HUB_PREFIX) else name.removeprefix(PREFIX)


def _built(family: Any, config: dict) -> Any:
    """Return the model that mlx-lm builds from a config.json, with lazy random weights."""
    return family.Model(family.ModelArgs.from_dict(json.loads(json.dumps(config))))


def _wrapped(port: Any, family: Any) -> ModuleType:
    """Return a port with the config.json and the tensor names of a wrapper of mlx-lm's."""
    prefix = port.Model.SPEC.prefix.replace(r"model\.", r"(?:language_model\.)?model\.(?:language_model\.)?", 1)
    rules = {"SPEC": replace(port.Model.SPEC, prefix=prefix), "RENAMED": (*port.Model.RENAMED, *FUSED_EXPERTS)}
    outer = ("outer", dict, field(default_factory=dict))
    return _made(port, family, (WrappedArgs, port.ModelArgs), (Wrapped, port.Model), [outer], rules)


def _made(port: Any, family: Any, args: tuple, model: tuple, fields: Sequence = (), rules: Any = None) -> ModuleType:
    """Return a module with a ModelArgs and a Model of these bases, which count as classes of `port`.

    fields: further ones of ModelArgs. rules: further attributes of Model.
    """
    made: Any = ModuleType(f"{port.__name__}.{family.__name__.rpartition('.')[2]}")
    place = {"__module__": port.__name__}
    made.ModelArgs = make_dataclass("ModelArgs", fields, bases=args, namespace={"FAMILY": family, **place})
    made.Model = type("Model", model, {**(rules or {}), **place})
    return made


def _extends(outer: Any, family: Any) -> bool:
    """Return whether a model is a family's Model in which only linear layers and embeddings have other classes."""
    changed, plain = _modules(outer), _modules(_built(family, vars(outer.args)))
    kept = {path for path, (kind, *_) in plain.items() if path and kind not in (nn.Linear, nn.Embedding)}
    own = {"__call__", "layers", "make_cache"} & vars(type(outer)).keys()
    return not own and changed.keys() == plain.keys() and all(changed[path] == plain[path] for path in kept)


def _holds(outer: Any, family: Any) -> bool:
    """Return whether a wrapper's output is that of a family's Model with the arguments of its language model.

    The language model is that Model, or has the same modules with the same values and calls them likewise.
    """
    language = outer[INSIDE]
    plain = family.Model(family.ModelArgs.from_dict(asdict(language.args)))
    mine, theirs = _modules(language), _modules(plain)
    alike = not hasattr(outer, "make_cache") or _caches(outer) == _caches(plain)
    if type(language) is not type(plain):
        mine[""] = theirs[""]
        alike = alike and _relays(language, "model", "lm_head") and _relays(plain, "model", "lm_head")
    return alike and mine == theirs and list(outer.children()) == [INSIDE] and _relays(outer, INSIDE)


def _modules(model: nn.Module) -> dict[str, tuple]:
    """Return what decides a model's output except weights and its code: by path, each module's class and values."""
    return {p: (type(m), {n: _value(n, v) for n, v in {**vars(m), **m}.items()}) for p, m in model.named_modules()}


def _value(name: str, value: Any) -> Any:
    """Return a module's value for a comparison: of weights the shape, None for modules and other objects."""
    if isinstance(value, mx.array):
        return value.tolist() if name.startswith("_") and value.size <= MAX_COMPARED else value.shape
    if isinstance(value, list):
        return [item for item in value if not isinstance(item, nn.Module)]
    return value if isinstance(value, int | float | str | FunctionType) else None


def _caches(model: Any) -> list[dict]:
    return [{"kind": type(cache), **vars(cache)} for cache in make_prompt_cache(model)]


class _Step(list):
    """Stand-in for a module: it stores the arguments of its call, and returns itself."""

    def __call__(self, *args: Any, **options: Any) -> "_Step":
        self.extend(value for value in (*args, *options.values()) if value is not None)
        return self


def _relays(model: Any, *names: str) -> bool:
    """Return whether a model's output is that of its modules in turn, of which the first reads tokens and caches.

    The modules are replaced.
    """
    tokens, cache, steps = mx.zeros((1, 1), mx.int32), [None], [_Step() for _ in names]
    for name, step in zip(names, steps, strict=True):
        setattr(model, name, step)
    result = model(tokens, cache)
    expected = [[tokens, cache], *([step] for step in steps[:-1])]
    same = [[*map(id, step)] == [*map(id, values)] for step, values in zip(steps, expected, strict=True)]
    return all(same) and result is steps[-1]
