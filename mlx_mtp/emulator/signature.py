"""The kernel function that MLX generates around a body, as text, and the buffers it binds.

The rules are those of MLX's `metal_kernel.cpp` (0.32).
"""

from dataclasses import dataclass

import mlx.core as mx

from .errors import CompileError

MOST_BUFFERS = 31  # of a Metal function
MAX_CONSTANT_SIZE = 8

TYPE_NAMES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "float16_t",
    mx.bfloat16: "bfloat16_t",
    mx.float32: "float",
    mx.complex64: "complex64_t",
}

# Attribute: its type and how the emulator computes it from `t`, what the runtime knows of a thread.
ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": ("uint", "t->dispatch_simdgroups * 8"),
    "dispatch_simdgroups_per_threadgroup": ("uint", "t->dispatch_simdgroups"),
    "dispatch_threads_per_threadgroup": ("uint3", "EMULATED_UINT3(t->dispatch_size)"),
    "grid_origin": ("uint3", "uint3(0)"),
    "grid_size": ("uint3", "EMULATED_UINT3(t->grid_size)"),
    "quadgroup_index_in_threadgroup": ("uint", "t->index / 4"),
    "quadgroups_per_threadgroup": ("uint", "t->simdgroups * 8"),
    "simdgroup_index_in_threadgroup": ("uint", "t->simdgroup"),
    "simdgroups_per_threadgroup": ("uint", "t->simdgroups"),
    "thread_execution_width": ("uint", "32u"),
    "thread_index_in_quadgroup": ("uint", "t->lane % 4"),
    "thread_index_in_simdgroup": ("uint", "t->lane"),
    "thread_index_in_threadgroup": ("uint", "t->index"),
    "thread_position_in_grid": ("uint3", "EMULATED_UINT3(t->grid)"),
    "thread_position_in_threadgroup": ("uint3", "EMULATED_UINT3(t->local)"),
    "threadgroup_position_in_grid": ("uint3", "EMULATED_UINT3(t->group)"),
    "threadgroups_per_grid": ("uint3", "EMULATED_UINT3(t->groups)"),
    "threads_per_grid": ("uint3", "EMULATED_UINT3(t->grid_size)"),
    "threads_per_simdgroup": ("uint", "32u"),
    "threads_per_threadgroup": ("uint3", "EMULATED_UINT3(t->local_size)"),
}


@dataclass(frozen=True)
class Parameter:
    """One buffer of the generated function: `kind` is data, shape, strides, ndim or output; `index` counts the
    inputs or the outputs."""

    name: str
    kind: str
    index: int
    declaration: str
    reference: bool


@dataclass(frozen=True)
class Signature:
    name: str
    template: tuple[tuple[str, str, str], ...]  # kind of parameter, its name, its value
    parameters: tuple[Parameter, ...]
    attributes: tuple[str, ...]

    @property
    def head(self) -> str:
        """The function up to its opening brace."""
        template = ", ".join(f"{kind} {name}" for kind, name, _ in self.template)
        parameters = [f"  {p.declaration} [[buffer({i})]]" for i, p in enumerate(self.parameters)]
        parameters += [f"  {ATTRIBUTES[a][0]} {a} [[{a}]]" for a in self.attributes]
        return (
            (f"template <{template}>\n" if template else "")
            + f"[[kernel]] void {self.name}(\n"
            + ",\n".join(parameters)
            + ") {\n"
        )

    @property
    def instance(self) -> str:
        """The function with its template arguments."""
        return self.name + (f"<{', '.join(v for _, _, v in self.template)}>" if self.template else "")

    @property
    def host_name(self) -> str:
        """The line with which MLX instantiates a template, or nothing."""
        if not self.template:
            return ""
        return f'\ntemplate [[host_name("{self.name}")]] [[kernel]] decltype({self.instance}) {self.instance};\n'


def type_name(dtype: mx.Dtype) -> str:
    """Metal's name of a dtype; ValueError where Metal has none."""
    if dtype not in TYPE_NAMES:
        raise ValueError(f"Metal has no type for {dtype}; it has {', '.join(str(t) for t in TYPE_NAMES)}")
    return TYPE_NAMES[dtype]


def template_argument(name: str, value) -> tuple[str, str, str]:
    if isinstance(value, bool):
        return "bool", name, str(int(value))
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"template argument {name} is {value}; MLX writes it into a name, where no minus can be")
        return "int", name, str(value)
    if isinstance(value, mx.Dtype):
        return "typename", name, type_name(value)
    raise ValueError(f"template argument {name} is {value!r}; it must be a dtype, an int or a bool")


def input_parameters(names: list[str], inputs: list[mx.array], source: str) -> list[Parameter]:
    parameters = []
    for i, (name, x) in enumerate(zip(names, inputs, strict=True)):
        space = "constant" if x.size < MAX_CONSTANT_SIZE else "device"
        declaration = f"const {space} {type_name(x.dtype)}{'&' if x.ndim == 0 else '*'} {name}"
        parameters.append(Parameter(name, "data", i, declaration, x.ndim == 0))
        about = {"shape": "int*", "strides": "int64_t*", "ndim": "int&"}
        for kind, type_ in about.items():
            if x.ndim > 0 and f"{name}_{kind}" in source:
                declaration = f"const constant {type_} {name}_{kind}"
                parameters.append(Parameter(f"{name}_{kind}", kind, i, declaration, kind == "ndim"))
    return parameters


def function_name(name: str, template: list, inputs: list[mx.array], output_dtypes: list[mx.Dtype]) -> str:
    """MLX's name of the function: a different one for every set of template arguments, types and spaces."""
    parts = ["custom_kernel_" + name]
    if template:
        # MLX writes <a, b> with each separator as one underscore and drops the closing one.
        parts.append("_" + "_".join(value for _, _, value in template))
    for x in inputs:
        space = "s" if x.ndim == 0 else "c" if x.size < MAX_CONSTANT_SIZE else ""
        parts.append(type_name(x.dtype) + space)
    parts += [type_name(d) for d in output_dtypes]
    return "_".join(parts)


def make_signature(
    name: str,
    *,
    input_names: list[str],
    output_names: list[str],
    source: str,
    inputs: list[mx.array],
    output_dtypes: list[mx.Dtype],
    template: list[tuple[str, object]],
    atomic_outputs: bool,
) -> Signature:
    """The function that MLX would generate for these arrays and template arguments."""
    arguments = [template_argument(n, v) for n, v in template]
    parameters = input_parameters(input_names, inputs, source)
    for i, (output, dtype) in enumerate(zip(output_names, output_dtypes, strict=True)):
        type_ = f"atomic<{type_name(dtype)}>" if atomic_outputs else type_name(dtype)
        parameters.append(Parameter(output, "output", i, f"device {type_}* {output}", False))
    if len(parameters) > MOST_BUFFERS:
        raise CompileError(f"kernel {name} has {len(parameters)} buffers, shapes and strides included; Metal has 31")
    return Signature(
        name=function_name(name, arguments, inputs, output_dtypes),
        template=tuple(arguments),
        parameters=tuple(parameters),
        attributes=tuple(a for a in ATTRIBUTES if a in source),
    )
