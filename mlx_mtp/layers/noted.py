"""Read a module's calls inside a forward that is not ours, and give modules their outputs."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

ORDER = itertools.count()


class ModuleCall(NamedTuple):
    """One call of a module: its number among all calls, its arguments, and what it returned."""

    number: int
    args: tuple[Any, ...]
    options: dict[str, Any]
    output: Any

    @property
    def given(self) -> tuple[Any, ...]:
        return (*self.args, *self.options.values())


class NotedCalls:
    """Mixin of a module: while `noting` it stores its calls; with `output` set it returns that and computes nothing.

    Its attributes are set by `noting` and `giving`.
    """

    noting = False
    output: Any = None
    calls: Any = None

    def __call__(self, *args: Any, **options: Any) -> Any:
        output = self.output
        if output is None:
            output = super().__call__(*args, **options)  # type: ignore[misc]
        if self.noting:
            self.calls.append(ModuleCall(next(ORDER), args, options, output))
        return output


def note(module: Any) -> None:
    """Make a module a `NotedCalls`."""
    if not isinstance(module, NotedCalls):
        kind = type(module)
        module.__class__ = type(kind.__name__, (NotedCalls, kind), {})


def unnote(module: Any) -> None:
    """Make a module that `note` changed what it was."""
    if type(module).__bases__[0] is NotedCalls:
        module.__class__ = type(module).__bases__[1]


@contextmanager
def noting(modules: Sequence[Any]) -> Iterator[list[list[ModuleCall]]]:
    """Context in which the calls of different modules are appended to the yielded lists, one per module."""
    found: list[list[ModuleCall]] = [[] for _ in modules]
    for module, calls in zip(modules, found, strict=True):
        _set(module, noting=True, calls=calls)
    try:
        yield found
    finally:
        for module in modules:
            _set(module, noting=False, calls=None)


@contextmanager
def noted(modules: Sequence[Any]) -> Iterator[list[list[ModuleCall]]]:
    """Context as `noting`, for modules of any class; they keep their class afterwards."""
    new = [module for module in modules if not isinstance(module, NotedCalls)]
    for module in new:
        note(module)
    try:
        with noting(modules) as found:
            yield found
    finally:
        for module in new:
            unnote(module)


@contextmanager
def giving(modules: Sequence[Any], outputs: Sequence[Any]) -> Iterator[None]:
    """Context in which `NotedCalls` modules return these outputs instead of computing anything."""
    for module, output in zip(modules, outputs, strict=True):
        _set(module, output=output)
    try:
        yield
    finally:
        for module in modules:
            _set(module, output=None)


def _set(module: Any, **attributes: Any) -> None:
    """Set attributes that are not the module's parameters."""
    for name, value in attributes.items():
        object.__setattr__(module, name, value)


def stream_of(output: Any) -> Any:
    """Return the residual stream in a layer's output: itself, or the first of several."""
    return output[0] if isinstance(output, tuple | list) and output else output


def input_of(call: ModuleCall) -> mx.array:
    """Return the residual stream that a layer read, its first argument of shape [n, L, H]; ValueError without one."""
    for each in call.given:
        if isinstance(each, mx.array) and each.ndim == 3:
            return each
    raise ValueError("a layer that reads no stream")


def with_stream(output: Any, stream: mx.array) -> Any:
    """Return a layer's output with another stream."""
    return type(output)((stream, *output[1:])) if isinstance(output, tuple | list) else stream


def modules_around_lists(model: Any) -> Iterator[nn.Module]:
    """Yield the modules of a model, outer ones first and without itself, that contain a list of modules."""
    paths = [path for path, module in model.named_modules() if not _in_list(path) and _has_list(module)]
    around = {".".join(path.split(".")[:end]) for path in paths for end in range(1, path.count(".") + 2)}
    modules = dict(model.named_modules())
    yield from (modules[path] for path in sorted(around - {""}, key=len))


def _in_list(path: str) -> bool:
    return any(part.isdigit() for part in path.split("."))


def _has_list(module: Any) -> bool:
    return any(isinstance(each, list) and each and isinstance(each[0], nn.Module) for each in module.values())
