"""Check the arguments that `BatchGenerator.insert_segments` takes by prompt."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from mlx_lm.generate import StopSequences

from ..decoding.ranges import OPTIONS
from ..decoding.sampling import Sampling
from ..machine.ranges import Allowed, InstanceOf, Tokens, check


class Stops(NamedTuple):
    """mlx_lm's stop sequences, None, and collections of collections of token ids."""

    words: str = "mlx_lm's StopSequences, or lists of token ids"

    def fits(self, value: Any) -> bool:
        several = isinstance(value, Collection) and all(map(Tokens().fits, value))
        return value is None or several or isinstance(value, StopSequences)


class Samplers(NamedTuple):
    """Functions and `Sampling`s."""

    words: str = "a function or a Sampling"

    def fits(self, value: Any) -> bool:
        return callable(value) or isinstance(value, Sampling)


STOPS = Stops()
# By name: what an entry that is not None must be. Others are checked where they are used.
ALLOWED: dict[str, Allowed] = {
    "caches": InstanceOf("a prompt cache", (Iterable,)),
    "samplers": Samplers(),
    "logits_processors": OPTIONS["logits_processors"],
    "stop_sequences": STOPS,
    "logprobs": OPTIONS["logprobs"],
    "stats": OPTIONS["stats"],
    "grammars": OPTIONS["grammar"],
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
    for name, allowed in ALLOWED.items():
        for i, value in enumerate(columns[name]):
            if value is not None:
                check(f"{name}[{i}]", value, allowed)
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
