"""`metal_kernel`, called as `mx.fast.metal_kernel` is, on the CPU."""

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from .compile import CONTRACTIONS, build
from .errors import KernelFault
from .faults import Explainer, unwritten
from .launch import INPUT, OUTPUT, Memory, run
from .signature import Parameter, Signature, make_signature
from .traffic import Traffic, make_traffic

MAX_THREADS = 1024
ALLOWABLE = ("races", "unwritten", "mem_none")
ORDERS = {"forward": 0, "reverse": 1}


@dataclass(frozen=True)
class Options:
    """How launches are emulated.

    `allow` names what is let pass: "races"; "unwritten" output elements, which then hold bytes of 0xff; "mem_none":
    barriers with `mem_flags::mem_none` order memory all the same. `order` of threads and threadgroups is "forward",
    "reverse" or a seed from 2 on. A thread may run `max_steps` blocks of code. `fp_contract` is clang's.
    """

    allow: frozenset[str] | set[str] | tuple[str, ...] = ()
    order: str | int = "forward"
    max_steps: int = 20_000_000
    optimize: int = 2
    fp_contract: str = "off"
    traffic: bool = True
    function_constants: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self):
        if unknown := set(self.allow) - set(ALLOWABLE):
            raise ValueError(f"allow has {sorted(unknown)}; it may have {', '.join(ALLOWABLE)}")
        if not (self.order in ORDERS or (isinstance(self.order, int) and 2 <= self.order < 2**32)):
            raise ValueError(f"order is {self.order!r}; it must be 'forward', 'reverse' or a seed from 2 on")
        if self.optimize not in (0, 1, 2, 3):
            raise ValueError(f"optimize is {self.optimize!r}; it must be 0, 1, 2 or 3")
        if self.fp_contract not in CONTRACTIONS:
            raise ValueError(f"fp_contract is {self.fp_contract!r}; it must be one of {', '.join(CONTRACTIONS)}")
        if self.max_steps < 1:
            raise ValueError(f"max_steps is {self.max_steps}; it must be at least 1")


observers: list[Callable[[Traffic], None]] = []
_default = Options()


def default_options(options: Options) -> Options:
    """Makes `options` those of launches that name none, and returns what they were."""
    global _default
    before, _default = _default, options
    return before


def _checked_triple(value: Sequence[int], name: str) -> tuple[int, int, int]:
    triple = tuple(int(v) for v in value)
    if len(triple) != 3 or min(triple) < 1:
        raise ValueError(f"{name} is {tuple(value)}; it must be three positive numbers of threads")
    return triple


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(bytearray(array.tobytes()), np.uint8)


def _numpy(x: mx.array) -> np.ndarray:
    return np.asarray(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)


def _input_memory(name: str, x: mx.array, contiguous: bool) -> tuple[Memory, tuple[int, ...]]:
    """The bytes that the kernel sees of an input, and the strides, in elements, that go with them."""
    a = _numpy(x)
    if x.size == 0 or contiguous or a.flags.c_contiguous:
        standard = tuple(int(np.prod(x.shape[i + 1 :])) for i in range(x.ndim))
        return Memory(name, _bytes(a), x.itemsize, INPUT), standard
    reach = [(n - 1) * s for n, s in zip(a.shape, a.strides, strict=True)]
    first, last = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
    start = a.__array_interface__["data"][0] + first
    window = np.ctypeslib.as_array((ctypes.c_uint8 * (last - first + x.itemsize)).from_address(start))
    return Memory(name, window.copy(), x.itemsize, INPUT, origin=-first), tuple(s // x.itemsize for s in a.strides)


def _parameter_memory(p: Parameter, inputs: list[mx.array], data: list[tuple[Memory, tuple[int, ...]]]) -> Memory:
    memory, strides = data[p.index]
    if p.kind == "data":
        return memory
    values = {
        "shape": np.array(inputs[p.index].shape, np.int32),
        "strides": np.array(strides, np.int64),
        "ndim": np.array([inputs[p.index].ndim], np.int32),
    }[p.kind]
    return Memory(p.name, _bytes(values), values.itemsize, INPUT)


def _output_memory(name: str, shape: Sequence[int], dtype: mx.Dtype, init_value: float | None) -> Memory:
    size = int(np.prod(shape)) * dtype.size
    if init_value is None:
        return Memory(name, np.full(size, 0xFF, np.uint8), dtype.size, OUTPUT, initialised=False)
    full = mx.full(tuple(shape), init_value, dtype=dtype)
    return Memory(name, _bytes(_numpy(full)), dtype.size, OUTPUT)


def _output_array(memory: Memory, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
    plain = mx.uint16 if dtype == mx.bfloat16 else dtype
    typed = memory.data.view(np.asarray(mx.zeros(1, plain)).dtype).reshape(tuple(shape))
    return mx.array(typed, plain).view(dtype)


def _values(inputs: Sequence) -> list[mx.array]:
    arrays = [x if isinstance(x, mx.array) else mx.array(x) for x in inputs]
    try:
        mx.eval(arrays)
    except ValueError as error:
        raise ValueError(
            "an emulated kernel needs arrays that have values; it cannot run inside mx.compile (mx.disable_compile() "
            "switches that off), mx.grad or mx.vmap"
        ) from error
    return arrays


class MetalKernel:
    """A kernel as `mx.fast.metal_kernel` makes it; `traffic` is the report of its last launch."""

    def __init__(
        self,
        name: str,
        input_names: Sequence[str],
        output_names: Sequence[str],
        source: str,
        header: str,
        ensure_row_contiguous: bool,
        atomic_outputs: bool,
    ):
        self.name = name
        self.input_names = list(input_names)
        self.output_names = list(output_names)
        self.source = source
        self.header = header
        self.ensure_row_contiguous = ensure_row_contiguous
        self.atomic_outputs = atomic_outputs
        self.traffic: Traffic | None = None

    def __call__(
        self,
        *,
        inputs: Sequence,
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, object]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream=None,
        options: Options | None = None,
    ) -> list[mx.array]:
        """Runs the kernel now. Arguments are those of `mx.fast.metal_kernel`'s result, and `options`.

        Raises KernelFault for what Metal leaves undefined, CompileError, and ValueError for wrong arguments.
        """
        options = options or _default
        grid, group = _checked_triple(grid, "grid"), _checked_triple(threadgroup, "threadgroup")
        if group[0] * group[1] * group[2] > MAX_THREADS:
            raise ValueError(f"threadgroup is {group}: {np.prod(group)} threads; it may have {MAX_THREADS}")
        group = tuple(min(t, g) for t, g in zip(group, grid, strict=True))
        for what, given, names in (
            ("inputs", inputs, self.input_names),
            ("output_shapes", output_shapes, self.output_names),
            ("output_dtypes", output_dtypes, self.output_names),
        ):
            if len(given) != len(names):
                raise ValueError(f"{what} has {len(given)} entries; kernel {self.name} needs {len(names)}")
        if stream is not None and getattr(stream, "device", stream) in (mx.cpu, mx.Device(mx.cpu)):
            raise ValueError("stream is on the CPU; a Metal kernel's is on the GPU")
        arrays = _values(inputs)
        signature = self._signature(arrays, output_dtypes, template or [])
        if verbose:
            sys.stdout.write(self.generated_source(signature) + "\n")
        memories = self._memories(signature, arrays, output_shapes, output_dtypes, init_value)
        library = build(
            signature,
            self.source,
            self.header,
            self.name,
            optimize=options.optimize,
            fp_contract=options.fp_contract,
            function_constants=options.function_constants,
        )
        self._run(library, memories, grid, group, options)
        outputs = [m for m, p in zip(memories, signature.parameters, strict=False) if p.kind == "output"]
        return [_output_array(*each) for each in zip(outputs, output_shapes, output_dtypes, strict=True)]

    def _signature(self, arrays: list[mx.array], output_dtypes: Sequence[mx.Dtype], template: Sequence) -> Signature:
        return make_signature(
            self.name,
            input_names=self.input_names,
            output_names=self.output_names,
            source=self.source,
            inputs=arrays,
            output_dtypes=list(output_dtypes),
            template=list(template),
            atomic_outputs=self.atomic_outputs,
        )

    def generated_source(self, signature: Signature) -> str:
        """The text that MLX would compile."""
        text = f"{self.header}{signature.head}{self.source}\n}}\n{signature.host_name}"
        return f"Generated source code for `{self.name}`:\n```\n{text}\n```"

    def _memories(self, signature, arrays, output_shapes, output_dtypes, init_value) -> list[Memory]:
        data = [
            _input_memory(name, x, self.ensure_row_contiguous)
            for name, x in zip(self.input_names, arrays, strict=True)
        ]
        return [
            _output_memory(p.name, output_shapes[p.index], output_dtypes[p.index], init_value)
            if p.kind == "output"
            else _parameter_memory(p, arrays, data)
            for p in signature.parameters
        ]

    def _run(self, library: Path, memories: list[Memory], grid, group, options: Options) -> None:
        outputs = [m for m in memories if m.kind == OUTPUT and not m.initialised]
        outcome = run(
            library,
            memories,
            grid=grid,
            threadgroup=group,
            order=ORDERS[options.order] if isinstance(options.order, str) else options.order,
            races="races" not in options.allow,
            none_orders="mem_none" in options.allow,
            traffic=options.traffic,
            max_steps=options.max_steps,
        )
        if outcome.fault is not None:
            explainer = Explainer(self.name, library, self.source, outcome, memories, group, options.max_steps)
            raise KernelFault(explainer.message(outcome.fault))
        if "unwritten" not in options.allow:
            for memory in outputs:
                if sentence := unwritten(self.name, memory):
                    raise KernelFault(sentence)
        self.traffic = make_traffic(self.name, outcome, grid, group)
        for observe in observers:
            observe(self.traffic)


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
    """A kernel from a body of Metal, with the arguments of `mx.fast.metal_kernel`; ValueError for wrong ones.

    `compile_options` is checked and has no effect: the emulator computes as "safe" does.
    """
    if not output_names:
        raise ValueError("output_names is empty; a kernel has at least one output")
    mode = (compile_options or {}).get("math_mode", "safe")
    if mode not in ("safe", "relaxed", "fast"):
        raise ValueError(f"math_mode is {mode!r}; it must be 'safe', 'relaxed' or 'fast'")
    return MetalKernel(name, input_names, output_names, source, header, ensure_row_contiguous, atomic_outputs)
