"""Record the calls of a model's modules, and find the first one whose rows depend on the number of rows in a pass."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

MOST = 2**18  # values of an array per row of a pass; keys and values of all positions have more, and are not kept
Arrays = Sequence[mx.array | None]
Same = Callable[[mx.array, mx.array], bool]


class ModuleCall(NamedTuple):
    """One call. path: of the module. caller: path of the module that called it. given, made: arrays in and out.

    None stands for an array that is too large.
    """

    path: str
    caller: str
    given: Arrays
    made: Arrays


class CallLog(AbstractContextManager):
    """Context in which each call of a module inside a model is recorded in `calls`, in the order of their ends.

    rows: number of rows of the pass.
    """

    def __init__(self, model: Any, rows: int):
        self.modules = {id(m): (path, m, type(m)) for path, m in model.named_modules() if path}
        self.calls, self.active, self.most = list[ModuleCall](), [""], MOST * rows

    def __enter__(self) -> "CallLog":
        for _, module, kind in self.modules.values():
            module.__class__ = _logged(kind)
            object.__setattr__(module, "_log", self)
        return self

    def __exit__(self, *_: Any) -> None:
        for _, module, kind in self.modules.values():
            module.__class__ = kind
            object.__delattr__(module, "_log")

    def record(self, module: Any, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result of a module's call, and record the call."""
        path, caller = self.modules[id(module)][0], self.active[-1]
        self.active.append(path)
        made = call(*args, **kwargs)
        self.active.pop()
        self.calls.append(ModuleCall(path, caller, self._arrays((args, kwargs)), self._arrays(made)))
        return made

    def _arrays(self, tree: Any) -> Arrays:
        """Return the arrays in nested lists, tuples and dicts, without those of other objects, such as caches."""
        found = [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]  # type: ignore[misc]
        return [array if array.size <= self.most else None for array in found]


class Logged:
    """Mixin of a module whose calls a CallLog records."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._log.record(self, super().__call__, args, kwargs)  # type: ignore[attr-defined, misc]


@cache
def _logged(kind: type) -> type:
    return type(kind.__name__, (Logged, kind), {})


def first_differing(together: Sequence[ModuleCall], alone: Sequence[Sequence[ModuleCall]], same: Same) -> str:
    """Return the path of the first module whose rows in one pass differ from the same rows alone; "" without one.

    That is a module with equal inputs. If they differ already, the operations between modules are the reason: the
    path is that of the module that contains them. together: the calls of one pass over all rows. alone: those of a
    pass over each row.
    """
    for i, call in enumerate(together):
        each = [calls[i] for calls in alone if i < len(calls) and calls[i].path == call.path]
        if len(each) < len(alone):  # the number of rows decides which modules are called
            return call.caller
        if not equal_rows(call.made, [c.made for c in each], same):
            return call.path if equal_rows(call.given, [c.given for c in each], same) else call.caller
    return ""


def equal_rows(together: Arrays, alone: Sequence[Arrays], same: Same) -> bool:
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
