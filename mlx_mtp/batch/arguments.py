"""Check the arguments that `BatchGenerator.insert_segments` takes by prompt."""

from collections.abc import Callable, Collection, Iterable, Mapping
from numbers import Integral
from typing import Any

from mlx_lm.generate import StopSequences

from ..decoding.sampling import Sampling
from ..decoding.stats import Stats


def _are_functions(value: Any) -> bool:
    return isinstance(value, Collection) and all(map(callable, value))


def _are_stops(value: Any) -> bool:
    return isinstance(value, StopSequences) or (isinstance(value, Collection) and all(map(_are_ids, value)))


def _are_ids(value: Any) -> bool:
    return isinstance(value, Collection) and all(isinstance(token, Integral) for token in value)


# By name: what an entry that is not None must be, in words and as a test. Others are checked where they are used.
ALLOWED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "caches": ("a prompt cache", lambda value: isinstance(value, Iterable)),
    "samplers": ("a function or a Sampling", lambda value: callable(value) or isinstance(value, Sampling)),
    "logits_processors": ("a list of functions", _are_functions),
    "stop_sequences": ("mlx_lm's StopSequences, or lists of token ids", _are_stops),
    "logprobs": ("True or False", lambda value: isinstance(value, bool)),
    "stats": ("a Stats", lambda value: isinstance(value, Stats)),
}


def columns_of(given: Mapping[str, tuple[Any, Any]], n: int) -> dict[str, list[Any]]:
    """Return, by name, each argument's list of n values, one per prompt.

    given: by name, the list that was given, or None, and the generator's own value, which replaces a None or empty
    list; in `max_tokens` and `logprobs` also an entry that is None. Raises ValueError as `for_each`, and for a
    value that ALLOWED excludes.
    """
    columns = {name: for_each(name, values, own, n) for name, (values, own) in given.items()}
    for name in ("max_tokens", "logprobs"):
        columns[name] = [given[name][1] if value is None else value for value in columns[name]]
    for name, (words, fits) in ALLOWED.items():
        for i, value in enumerate(columns[name]):
            if value is not None and not fits(value):
                raise ValueError(f"{name}[{i}]={repr(value)[:80]}: allowed is {words}")
    return columns


def for_each(name: str, values: Any, own: Any, n: int) -> list[Any]:
    """Return an argument's values for n prompts: `values`, or n times `own` if it is None or empty.

    Raises ValueError for a string, a value without a length, or another length than n and 0.
    """
    if values is None:
        return [own] * n
    if not hasattr(values, "__len__") or isinstance(values, str):
        raise ValueError(f"{name}={values!r}: expected a list, with one entry for each of {n} prompts")
    if len(values) not in (0, n):
        raise ValueError(f"{name}: {len(values)} values; expected one for each of {n} prompts")
    return list(values) or [own] * n
