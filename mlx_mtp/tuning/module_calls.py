"""Record the calls of a model's modules, and find the first one whose rows depend on the number of rows in a pass."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

Same = Callable[[mx.array, mx.array], bool]


class ModuleCall(NamedTuple):
    """One call. path: of the module. caller: path of the module that called it. given, made: arrays in and out."""

    path: str
    caller: str
    given: list[mx.array]
    made: list[mx.array]


class CallLog(AbstractContextManager):
    """Context in which each call of a module inside a model is recorded in `calls`, in the order of their ends."""

    def __init__(self, model: Any):
        self.modules = {id(m): (path, m, type(m)) for path, m in model.named_modules() if path}
        self.calls, self.active = list[ModuleCall](), [""]

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
        self.calls.append(ModuleCall(path, caller, _arrays((args, kwargs)), _arrays(made)))
        return made


class Logged:
    """Mixin of a module whose calls a CallLog records."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._log.record(self, super().__call__, args, kwargs)  # type: ignore[attr-defined, misc]


@cache
def _logged(kind: type) -> type:
    return type(kind.__name__, (Logged, kind), {})


def _arrays(tree: Any) -> list[mx.array]:
    """Return the arrays in nested lists, tuples and dicts; those of other objects, such as caches, are left out."""
    return [leaf for _, leaf in tree_flatten(tree) if isinstance(leaf, mx.array)]  # type: ignore[misc]


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


def equal_rows(together: Sequence[mx.array], alone: Sequence[Sequence[mx.array]], same: Same) -> bool:
    """Return whether arrays with all rows are the `same` as those of single rows, joined as `_joined`."""
    joined = [(whole, _joined(whole, parts)) for whole, *parts in zip(together, *alone, strict=False)]
    return all(rows is None or same(whole, rows) for whole, rows in joined)


def _joined(whole: mx.array, parts: list[mx.array]) -> mx.array | None:
    """Return the arrays of single rows, joined along the axis on which `whole` has all rows.

    None if there is no such axis, as for masks, and for rows that are flattened or sorted.
    """
    for axis, n in enumerate(whole.shape):
        one = (*whole.shape[:axis], 1, *whole.shape[axis + 1 :])
        if n == len(parts) and all(part.shape == one for part in parts):
            return mx.concatenate(parts, axis=axis)
    return None
