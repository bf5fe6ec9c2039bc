"""Generate the function that MLX puts around a kernel's body, and list the buffers that it binds.

The rules are those of MLX's `metal_kernel.cpp` (0.32).
"""

import csv
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

MAX_CONSTANT_SIZE = 8
MOST_BUFFERS = 31  # maximum of a Metal function

UNSIGNED, SIGNED = (mx.uint8, mx.uint16, mx.uint32, mx.uint64), (mx.int8, mx.int16, mx.int32, mx.int64)
TYPE_NAMES = {
    mx.bool_: "bool",
    **{t: f"{str(t).removeprefix('mlx.core.')}_t" for t in (*UNSIGNED, *SIGNED, mx.float16, mx.bfloat16)},
    **{mx.float32: "float", mx.complex64: "complex64_t"},
}

# Attribute: its type, and its C++ expression in `t`, the runtime's data of a thread.
LINES = Path(__file__).with_name("attributes.csv").read_text().splitlines()[1:]
ATTRIBUTES = {name: (type_, value) for name, type_, value in csv.reader(LINES)}


class BufferParameter(NamedTuple):
    """One buffer of the generated function: its name, its declaration, and whether it is a reference."""

    name: str
    declaration: str
    reference: bool


@dataclass(frozen=True)
class Signature:
    """The generated function's name, template and buffers, and the thread attributes that its body uses."""

    name: str
    template: tuple[tuple[str, str, str], ...]  # kind of parameter, its name, its value
    parameters: tuple[BufferParameter, ...]
    attributes: tuple[str, ...]

    @property
    def head(self) -> str:
        """The function up to its opening brace."""
        template = ", ".join(f"{kind} {name}" for kind, name, _ in self.template)
        parameters = [f"  {p.declaration} [[buffer({i})]]" for i, p in enumerate(self.parameters)]
        parameters += [f"  {ATTRIBUTES[a][0]} {a} [[{a}]]" for a in self.attributes]
        start = f"template <{template}>\n" if template else ""
        return f"{start}[[kernel]] void {self.name}(\n" + ",\n".join(parameters) + ") {\n"

    @property
    def instance(self) -> str:
        """The function with its template arguments."""
        return self.name + (f"<{', '.join(v for _, _, v in self.template)}>" if self.template else "")

    @property
    def host_name(self) -> str:
        """The line with which MLX instantiates a template; "" without template arguments."""
        if not self.template:
            return ""
        return f'\ntemplate [[host_name("{self.name}")]] [[kernel]] decltype({self.instance}) {self.instance};\n'


def type_name(dtype: mx.Dtype) -> str:
    """Return Metal's name of a dtype; ValueError if Metal lacks it."""
    if dtype not in TYPE_NAMES:
        raise ValueError(f"Metal has no type for {dtype}; it has {', '.join(str(t) for t in TYPE_NAMES)}")
    return TYPE_NAMES[dtype]


def template_argument(name: str, value: object) -> tuple[str, str, str]:
    """Return a template parameter's kind, name and value; ValueError unless it is a dtype, a bool or an int >= 0."""
    if isinstance(value, bool):
        return "bool", name, str(int(value))
    if isinstance(value, int):
        if value < 0:
            raise ValueError(
                f"template argument {name} is {value}; MLX puts it into a name, which cannot contain a minus"
            )
        return "int", name, str(value)
    if isinstance(value, mx.Dtype):
        return "typename", name, type_name(value)
    raise ValueError(f"template argument {name} is {value!r}; it must be a dtype, an int or a bool")


def input_parameters(name: str, x: mx.array, source: str) -> Iterator[BufferParameter]:
    """Yield the buffers of one input: x, and those of its shape, strides and ndim that the body uses."""
    space = "constant" if x.size < MAX_CONSTANT_SIZE else "device"
    yield BufferParameter(
        name, f"const {space} {type_name(x.dtype)}{'&' if x.ndim == 0 else '*'} {name}", x.ndim == 0
    )
    yield from _about(name, source) if x.ndim > 0 else ()


@functools.cache
def _about(name: str, source: str) -> tuple[BufferParameter, ...]:
    """Return the buffers of an input's shape, strides and ndim that the body uses."""
    kinds = (("shape", "int*"), ("strides", "int64_t*"), ("ndim", "int&"))
    return tuple(
        BufferParameter(f"{name}_{what}", f"const constant {type_} {name}_{what}", what == "ndim")
        for what, type_ in kinds
        if f"{name}_{what}" in source
    )


@functools.cache
def attributes_in(source: str) -> tuple[str, ...]:
    """Return the thread attributes that a body uses."""
    return tuple(name for name in ATTRIBUTES if name in source)


def function_name(
    name: str, template: Sequence[tuple[str, str, str]], inputs: Sequence[mx.array], output_dtypes: Sequence[mx.Dtype]
) -> str:
    """Return MLX's name of the function, which differs for each set of template arguments, types and spaces."""
    parts = ["custom_kernel_" + name]
    if template:
        # MLX writes <a, b> with each separator as one underscore and omits the closing one.
        parts.append("_" + "_".join(value for _, _, value in template))
    for x in inputs:
        parts.append(type_name(x.dtype) + ("s" if x.ndim == 0 else "c" if x.size < MAX_CONSTANT_SIZE else ""))
    return "_".join([*parts, *map(type_name, output_dtypes)])
