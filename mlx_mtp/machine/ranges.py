"""Define ranges of option values, so that every function refuses the same values with the same words."""

from collections.abc import Collection, Mapping
from numbers import Integral, Real
from typing import Any, NamedTuple, Protocol

import numpy as np


class Allowed(Protocol):
    """The allowed values of an option, in words and as a test."""

    @property
    def words(self) -> str: ...
    def fits(self, value: Any) -> bool: ...


class Range(NamedTuple):
    """Numbers from `least` to `most`, by default integers; never True, False or NaN. optional: also None."""

    words: str
    least: float
    most: float
    whole: bool = True
    optional: bool = False

    def fits(self, value: Any) -> bool:
        if value is None or isinstance(value, bool | np.bool_):
            return value is None and self.optional
        number: Any = value
        return isinstance(value, Integral if self.whole else Real) and bool(self.least <= number <= self.most)


class IntegerChoice(NamedTuple):
    """None and some integers."""

    words: str
    values: tuple[int, ...]

    def fits(self, value: Any) -> bool:
        return value is None or (is_integer(value) and value in self.values)


class InstanceOf(NamedTuple):
    """The instances of some types. optional: also None."""

    words: str
    types: tuple[type, ...]
    optional: bool = False

    def fits(self, value: Any) -> bool:
        return isinstance(value, self.types) or (self.optional and value is None)


class Functions(NamedTuple):
    """None and functions; with `several` None and collections of functions."""

    words: str
    several: bool = False

    def fits(self, value: Any) -> bool:
        if value is None or not self.several:
            return value is None or callable(value)
        return isinstance(value, Collection) and all(map(callable, value))


class Tokens(NamedTuple):
    """Collections of token ids."""

    words: str = "a collection of token ids"

    def fits(self, value: Any) -> bool:
        return isinstance(value, Collection) and not isinstance(value, str | bytes) and all(map(is_integer, value))


def is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


FLAG, SWITCH = (
    InstanceOf("True or False", (bool, np.bool_)),
    InstanceOf("True, False or None", (bool, np.bool_), True),
)
COUNT = Range("1 or more, as an integer", 1, float("inf"))
PART = Range("between 0 and 1", 0, 1, False)


def check(name: str, value: Any, allowed: Allowed) -> None:
    """Raise a ValueError that names an option, its value and the allowed ones, unless the value is allowed."""
    if not allowed.fits(value):
        raise ValueError(f"{name}={repr(value)[:80]}: allowed is {allowed.words}")


def check_options(options: dict[str, Any], allowed: Mapping[str, Allowed]) -> None:
    """Raise ValueError for the first option that `allowed` excludes; options without an entry are not checked."""
    for name, value in options.items():
        if name in allowed:
            check(name, value, allowed[name])
