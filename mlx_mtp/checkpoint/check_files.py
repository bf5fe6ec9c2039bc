"""Check that a checkpoint's files contain every tensor that the model needs, whatever the index lists."""

from dataclasses import replace
from typing import Any

from .files import FLOATS, FP8_SCALES
from .parameters import named
from .sort_tensors import EXPERT, Contents

WITH_WEIGHT = ((".scales", ".weight"), (".biases", ".weight"), *((f".weight{s}", ".weight") for s in FP8_SCALES))


def check_complete(model: Any, contents: Contents) -> None:
    """Raise ValueError for an unreadable file, or a tensor that only the index has, if the model needs it.

    An unreadable file is needed if any parameter is missing, or it may have heads that are to be loaded. Warn about
    unneeded ones, except absent tensors of heads that are not loaded, and about unused files. Missing tensors that
    the index does not list are not reported here.
    """
    stored = contents.stored
    assert stored is not None  # the tensors are a checkpoint's, not an external drafter's
    if stored.absent or stored.unread:
        found = {EXPERT.sub(".experts.0.", name): name for name in (*contents.trunk, *contents.heads)}
        provided = {path for name in found.values() for path in model.renamed(name)}
        parameters = named(model)
        for name in stored.absent:
            if _is_needed(model, contents, name, parameters, provided, found.keys()):
                raise ValueError(stored.missing(name))
        for file, error in stored.unread.items():
            listed = [name for name, place in stored.listed.items() if stored.path / place == file]
            layers = model.args.num_hidden_layers
            heads = not listed or any(model.spec.locate(name, layers) for name in listed)
            if parameters.keys() - provided or (contents.needs_heads and heads):
                raise ValueError(error)
    layers, heads = model.args.num_hidden_layers, contents.needs_heads
    absent = {name: file for name, file in stored.absent.items() if heads or not model.spec.locate(name, layers)}
    replace(stored, absent=absent).warn(stacklevel=8)


def _is_needed(model: Any, contents: Contents, name: str, parameters: Any, provided: Any, found: Any) -> bool:
    """Return whether the model needs an absent tensor: no other tensor provides that parameter, expert or scale.

    parameters: the model's, by path. provided: paths that other tensors become. found: names of those tensors, an
    expert's with the number 0.
    """
    for suffix, weight in WITH_WEIGHT:
        base = contents.trunk.get(name.removesuffix(suffix) + weight)
        if name.endswith(suffix) and base is not None and base.dtype not in FLOATS:
            return True
    expert = EXPERT.search(name)
    for path in model.renamed(name):
        if path in parameters and path not in provided:
            return True
        if expert and path in parameters and EXPERT.sub(".experts.0.", name) in found:
            return int(expert[1]) < parameters[path].shape[0]
    return False
