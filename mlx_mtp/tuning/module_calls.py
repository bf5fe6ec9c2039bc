"""Find the first module of a model whose rows depend on the number of rows in a pass."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from ..layers.noted import NotedCalls, note, noting, unnote

MOST = 2**18  # values of an array per row of a pass; keys and values of all positions have more, and are not kept
CallArrays = Sequence[mx.array | None]  # None stands for an array that is too large
Same = Callable[[mx.array, mx.array], bool]


class ModuleArrays(NamedTuple):
    """The arrays that a module at a path got and returned in one call."""

    path: str
    given: CallArrays
    made: CallArrays


def calls_of(modules: Mapping[str, Any], rows: int, run: Callable[[], Any]) -> tuple[Any, list[ModuleArrays]]:
    """Return the result of `run`, a pass of this number of rows, and the calls of modules in the order of their ends.

    modules: by path.
    """
    new = [module for module in modules.values() if not isinstance(module, NotedCalls)]
    for module in new:
        note(module)
    try:
        with noting([*modules.values()]) as found:
            result = run()
    finally:
        for module in new:
            unnote(module)
    calls = sorted(
        (c.number, path, c.given, c.output) for path, each in zip(modules, found, strict=True) for c in each
    )
    most = MOST * rows
    return result, [ModuleArrays(path, _arrays(given, most), _arrays(made, most)) for _, path, given, made in calls]


def _arrays(tree: Any, most: int) -> CallArrays:
    """Return the arrays in nested lists, tuples and dicts, without those of other objects, such as caches."""
    found = [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]  # type: ignore[misc]
    return [array if array.size <= most else None for array in found]


def first_differing(together: Sequence[ModuleArrays], alone: Sequence[Sequence[ModuleArrays]], same: Same) -> str:
    """Return the path of the first module whose rows in one pass differ from the same rows alone; "" without one.

    That is a module with equal inputs. If they differ already, the operations between modules are the reason: the
    path is then that of the list or module that contains it. together: the calls of one pass over all rows. alone:
    those of a pass over each row.
    """
    for i, call in enumerate(together):
        each = [calls[i] for calls in alone if i < len(calls) and calls[i].path == call.path]
        outside = call.path.rpartition(".")[0]
        if len(each) < len(alone):  # the number of rows decides which modules are called
            return outside
        if not equal_rows(call.made, [c.made for c in each], same):
            return call.path if equal_rows(call.given, [c.given for c in each], same) else outside
    return ""


def equal_rows(together: CallArrays, alone: Sequence[CallArrays], same: Same) -> bool:
    """Return whether arrays with all rows are the `same` as those of single rows, joined as `_joined`."""
    kept = [each for each in zip(together, *alone, strict=False) if not any(array is None for array in each)]
    joined: Any = [(whole, _joined(whole, parts)) for whole, *parts in kept]
    return all(rows is None or same(whole, rows) for whole, rows in joined)


def _joined(whole: Any, parts: list[Any]) -> mx.array | None:
    """Return the arrays of single rows, joined along the axis on which `whole` has all rows.

    None if there is no such axis, as for masks, and for rows that are flattened or sorted.
    """
    for axis, n in enumerate(whole.shape):
        one = (*whole.shape[:axis], 1, *whole.shape[axis + 1 :])
        if n == len(parts) and all(part.shape == one for part in parts):
            return mx.concatenate(parts, axis=axis)
    return None
