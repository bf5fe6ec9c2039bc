"""Put the emulator in the place of `mx.fast.metal_kernel`, for code that does not know of it."""

import functools
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import mlx.core as mx

from .kernel import MetalKernel, emulations, metal_kernel
from .options import EmulatorOptions
from .traffic import Traffic

_CACHED_FUNCTION = type(functools.lru_cache(lambda: None))


def _makes_kernels(module: ModuleType) -> bool:
    name, spec = getattr(module, "__name__", ""), getattr(module, "__spec__", None)
    if name.split(".")[0] == "mlx" or name.startswith("mlx_mtp.emulator") or name == "__main__":
        return False
    source = str(spec and spec.origin).endswith(".py")
    if not source or not any(value is mx for value in vars(module).values()):  # arrays compare by element
        return False
    try:
        return "metal_kernel(" in inspect.getsource(module)
    except OSError:
        return False


def _holds_kernel(value: object) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return isinstance(value, MetalKernel) or any(map(_holds_kernel, inside))


def _made_again(module: ModuleType) -> dict[str, object]:
    """The module's kernels, and its cached functions, from a second run of its source."""
    spec: Any = module.__spec__
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    return {
        name: value
        for name, value in vars(again).items()
        if (isinstance(value, _CACHED_FUNCTION) and value.__module__ == module.__name__) or _holds_kernel(value)
    }


def _replace(undo: ExitStack, owner: object, name: str, value: object) -> None:
    undo.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


@contextmanager
def emulated(options: EmulatorOptions | None = None) -> Iterator[list[Traffic]]:
    """Run kernels on the CPU inside; yields the list to which every launch adds its report.

    `mx.fast.metal_kernel` is the emulator's, MLX says that Metal is available and the GPU the default device, and
    mx.compile is off. Kernels that an imported module made when it was imported (or did not make, for want of Metal)
    are made again for the time being. `options` are those of launches that name none. Not for several threads.
    """
    launches: list[Traffic] = []
    gpu = mx.Device(mx.gpu)
    with ExitStack() as undo:
        emulations.append((options or EmulatorOptions(), launches))
        undo.callback(emulations.pop)
        for owner, name, value in (
            (mx.fast, "metal_kernel", metal_kernel),
            (mx.metal, "is_available", lambda: True),
            (mx, "default_device", lambda: gpu),
        ):
            _replace(undo, owner, name, value)
        mx.disable_compile()
        undo.callback(mx.enable_compile)
        for module in [m for m in sys.modules.values() if _makes_kernels(m)]:
            for name, value in _made_again(module).items():
                _replace(undo, module, name, value)
        yield launches
