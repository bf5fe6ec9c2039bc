"""Translate transformers 5's lists of layer types into the patterns that families read."""

from collections.abc import Callable
from typing import Any

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
DENSE, SPARSE = "dense", "sparse"


def interval(kinds: list[str]) -> int | None:
    """Return n if every n-th layer, and no other, has full attention; None for any other order.

    Without full attention, n is the number of layers plus one.
    """
    first = kinds.index(FULL) + 1 if FULL in kinds else len(kinds) + 1
    return first if [(i + 1) % first == 0 for i in range(len(kinds))] == [kind == FULL for kind in kinds] else None


def letters(kinds: list[str]) -> str | None:
    """Return one letter per layer, "G" for full attention and "L" for any other kind; None if all have "G"."""
    return "".join("G" if kind == FULL else "L" for kind in kinds) if {*kinds} - {FULL} else None


def leading_dense(kinds: list[str]) -> int | None:
    """Return the number of dense layers, which may be 0, if all of them come first; None for any other order."""
    count = kinds.count(DENSE)
    return count if kinds[:count] == [DENSE] * count else None


LETTERED = "sliding_window_pattern"  # a number, or in some families letters
# Field of a family: the list that it is derived from, and the function that derives it (None: not expressible).
PATTERNS: dict[str, tuple[str, Callable[[list[str]], Any]]] = {
    LETTERED: ("layer_types", interval),
    "full_attention_interval": ("layer_types", interval),
    "first_k_dense_replace": ("mlp_layer_types", leading_dense),
    "num_dense_layers": ("mlp_layer_types", leading_dense),
    "mlp_only_layers": ("mlp_layer_types", lambda kinds: [i for i, kind in enumerate(kinds) if kind == DENSE]),
}


def same_layers(name: str, kinds: Any, config: dict[str, Any], read: set[str]) -> bool:
    """Return whether a field that the family reads already states the layer types in the list `kinds`.

    name: the list's key in config.json. config: the fields' values. read: names of the fields that the family reads.
    False if `kinds` is no list.
    """
    fields = [field for field, (source, _) in PATTERNS.items() if source == name and field in read]
    if not isinstance(kinds, list):
        return False
    stated = [(config.get(field), PATTERNS[field][1](kinds)) for field in fields]
    held = any(value is not None and value == derived for value, derived in stated)
    return held or (LETTERED in fields and letters(kinds) == config.get(LETTERED))
