"""Call a kernel on the CPU with the interface of `mx.fast.metal_kernel`'s result, without changes to the caller."""

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from .buffers import OUTPUT, KernelBuffer, input_buffers, output_array, output_buffer
from .compile import build
from .faults import Explainer, numbered, unwritten
from .launch import Traffic, Triple, make_traffic, run
from .options import CompileError, EmulatorOptions, KernelFault
from .signature import (
    MOST_BUFFERS,
    BufferParameter,
    Signature,
    attributes_in,
    function_name,
    input_parameters,
    template_argument,
    type_name,
)

MAX_THREADS = 1024

_CACHED_FUNCTION = type(functools.lru_cache(lambda: None))
# Entered `emulated` blocks, innermost last: default options of launches, and the list of their reports.
emulations: list[tuple[EmulatorOptions, list[Traffic]]] = []


def _checked_triple(value: Sequence[int], name: str) -> Triple:
    triple = tuple(int(v) for v in value)
    if len(triple) != 3 or min(triple) < 1:
        raise ValueError(f"{name} is {tuple(value)}; it must be three positive numbers of threads")
    return triple


def _values(inputs: Sequence) -> list[mx.array]:
    arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
    try:
        mx.eval(arrays)
    except ValueError as error:
        inside = "inside mx.compile (mx.disable_compile() switches that off), mx.grad or mx.vmap"
        raise ValueError(f"an emulated kernel needs arrays that have values; it cannot run {inside}") from error
    return arrays


@dataclass(eq=False)
class MetalKernel:
    """A kernel as returned by `mx.fast.metal_kernel`; `traffic` reports its last completed launch, if any."""

    name: str
    input_names: list[str]
    output_names: list[str]
    source: str
    header: str
    ensure_row_contiguous: bool
    atomic_outputs: bool
    traffic: Traffic | None = field(default=None, init=False)
    runs_at_once: ClassVar[bool] = True  # a launch is complete when the call returns

    def __call__(
        self,
        *,
        inputs: Sequence,
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: Sequence[int],
        threadgroup: Sequence[int],
        template: Sequence[tuple[str, object]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream=None,
        options: EmulatorOptions | None = None,
    ) -> list[mx.array]:
        """Run the kernel now; return its outputs.

        Arguments are those of the result of `mx.fast.metal_kernel`, and `options`.
        options: None for those of the innermost `emulated` block, else the defaults. Raises KernelFault for behaviour
        that Metal leaves undefined and `options` do not allow, CompileError, and ValueError for wrong arguments and
        as `find_clang`.
        """
        options = options or (emulations[-1][0] if emulations else EmulatorOptions())
        threads, group = _checked_triple(grid, "grid"), _checked_triple(threadgroup, "threadgroup")
        if group[0] * group[1] * group[2] > MAX_THREADS:
            raise ValueError(f"threadgroup is {group}: {np.prod(group)} threads; allowed are at most {MAX_THREADS}")
        group = tuple(min(t, g) for t, g in zip(group, threads, strict=True))
        given = {"inputs": inputs, "output_shapes": output_shapes, "output_dtypes": output_dtypes}
        for what, entries in given.items():
            needed = len(self.input_names if what == "inputs" else self.output_names)
            if len(entries) != needed:
                raise ValueError(f"{what} has {len(entries)} entries; kernel {self.name} needs {needed}")
        if stream is not None and getattr(stream, "device", stream) in (mx.cpu, mx.Device(mx.cpu)):
            raise ValueError("stream is on the CPU; a Metal kernel needs one on the GPU, or None")
        arrays = _values(inputs)
        signature = self._signature(arrays, output_dtypes, template or [])
        if (count := len(signature.parameters)) > MOST_BUFFERS:
            has = f"{count} buffers, shapes and strides included"
            raise CompileError(f"kernel {self.name} has {has}; Metal allows {MOST_BUFFERS}")
        if verbose:
            sys.stdout.write(self.generated_source(signature) + "\n")
        named: dict[str, KernelBuffer] = {}
        for name, x in zip(self.input_names, arrays, strict=True):
            named |= input_buffers(name, x, self.ensure_row_contiguous)
        made = zip(self.output_names, output_shapes, output_dtypes, strict=True)
        outputs = [output_buffer(*each, init_value) for each in made]
        library = build(signature, self.source, self.header, self.name, options)
        inner = [named[p.name] for p in signature.parameters[: -len(outputs)]]
        self._run(library, [*inner, *outputs], threads, group, options)
        return [output_array(*each) for each in zip(outputs, output_shapes, output_dtypes, strict=True)]

    def _signature(
        self, inputs: list[mx.array], output_dtypes: Sequence[mx.Dtype], template: Sequence[tuple[str, object]]
    ) -> Signature:
        """Return the function that MLX would generate for these arrays and template arguments."""
        arguments = tuple(template_argument(name, value) for name, value in template)
        named = zip(self.input_names, inputs, strict=True)
        parameters = [p for name, x in named for p in input_parameters(name, x, self.source)]
        for output, dtype in zip(self.output_names, output_dtypes, strict=True):
            type_ = f"atomic<{type_name(dtype)}>" if self.atomic_outputs else type_name(dtype)
            parameters.append(BufferParameter(output, f"device {type_}* {output}", False))
        name = function_name(self.name, arguments, inputs, output_dtypes)
        return Signature(name, arguments, tuple(parameters), attributes_in(self.source))

    def text(self, signature: Signature) -> str:
        """Return the text that MLX would compile after its preamble: header, function and instantiation, if any."""
        return f"{self.header}{signature.head}{self.source}\n}}\n{signature.host_name}"

    def generated_source(self, signature: Signature) -> str:
        """Return the text that MLX prints with `verbose`."""
        return f"Generated source code for `{self.name}`:\n```\n{self.text(signature)}\n```"

    def _run(
        self, library: Path, buffers: list[KernelBuffer], grid: Triple, group: Triple, options: EmulatorOptions
    ) -> None:
        outcome = run(library, buffers, grid, group, options)
        if outcome.fault is not None:
            code = numbered(f"{self.name}.h", self.header) | numbered(f"{self.name}.metal", self.source)
            raise KernelFault(Explainer(self.name, library, code, outcome, group, options.max_steps).message())
        if "unwritten" not in options.allow:
            for buffer in buffers:
                if buffer.kind == OUTPUT and not buffer.initialised and (sentence := unwritten(self.name, buffer)):
                    raise KernelFault(sentence)
        self.traffic = make_traffic(self.name, outcome, grid, group)
        for _, launches in emulations:
            launches.append(self.traffic)


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Mapping[str, str] | None = None,
) -> MetalKernel:
    """Create a kernel from a Metal body, with the arguments of `mx.fast.metal_kernel`; nothing is compiled yet.

    Raises ValueError without output names and for an unknown "math_mode" in `compile_options`, which otherwise have
    no effect: the emulator always computes as "safe" does.
    """
    if not output_names:
        raise ValueError("output_names is empty; a kernel has at least one output")
    mode = (compile_options or {}).get("math_mode", "safe")
    if mode not in ("safe", "relaxed", "fast"):
        raise ValueError(f"math_mode is {mode!r}; it must be 'safe', 'relaxed' or 'fast'")
    names = list(input_names), list(output_names)
    return MetalKernel(name, *names, source, header, ensure_row_contiguous, atomic_outputs)


@functools.cache  # scanning modules takes longer than most launches
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


@functools.cache
def _made_again(module: ModuleType, maker: Callable[..., Any]) -> dict[str, object]:
    """Run the module's source again; return its values that are or hold kernels, and cached functions, by name.

    maker: the present `mx.fast.metal_kernel`, which makes the kernels; the result is kept for each.
    """
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
    """Run kernels on the CPU inside the block; yield the list to which each completed launch adds its report.

    Inside, `mx.fast.metal_kernel` is the emulator's, MLX reports Metal as available and the GPU as default device,
    and mx.compile is off; it is on afterwards. Kernels that imported modules created at import (or did not
    create, without Metal) are recreated for the block. `options` apply to launches that pass none. Do not use it
    in several threads.
    """
    launches: list[Traffic] = []
    emulations.append((options or EmulatorOptions(), launches))
    try:
        with replaced(metal_kernel):
            yield launches
    finally:
        emulations.pop()


@contextmanager
def replaced(maker: Callable[..., Any]) -> Iterator[None]:
    """Replace `mx.fast.metal_kernel` inside the block by `maker`, a function that returns a MetalKernel.

    As in `emulated`, Metal counts as available, mx.compile is off, and modules' kernels are recreated.
    """
    gpu = mx.Device(mx.gpu)
    with ExitStack() as undo:
        _replace(undo, mx.fast, "metal_kernel", maker)
        _replace(undo, mx.metal, "is_available", lambda: True)
        _replace(undo, mx, "default_device", lambda: gpu)
        mx.disable_compile()
        undo.callback(mx.enable_compile)
        for module in [m for m in sys.modules.values() if _makes_kernels(m)]:
            for name, value in _made_again(module, maker).items():
                _replace(undo, module, name, value)
        yield
