"""Count a Metal text's registers with an AMD GPU's back end: a proxy, because Apple's compiler runs only on Macs.

Kernels are translated as for the front end check and compiled for a GPU that also has simdgroups of 32 threads, with
the number of 32-bit registers ("words") per thread assumed for an Apple GPU. It is another compiler and another GPU:
a kernel that spills words here probably spills or loses occupancy there. It shows no more than that.
"""

import functools
import re
from pathlib import Path
from typing import NamedTuple

from mlx_mtp.emulator.dialect import closing, kernels, to_opencl
from mlx_mtp.emulator.opencl import LIBRARY, Diagnostic, expanded, language, preamble_text, precompiled, run
from mlx_mtp.emulator.options import CompileError

WORDS = 128  # registers per thread
WAVES = 10  # simdgroups at once; unless stated, the scheduler uses more registers than exist
COMMAND = ["--target=amdgcn-amd-amdhsa", "-mcpu=gfx1100", "-nogpulib", "-O2", "-Wno-everything"]
DEFINITIONS = Path(__file__).with_name("registers.h")
# A thread's attributes, from the group's size and from instructions that return its position.
ATTRIBUTES = {
    "thread_index_in_threadgroup": "place",
    "thread_index_in_simdgroup": "place % 32",
    "simdgroup_index_in_threadgroup": "__builtin_amdgcn_readfirstlane(place / 32)",
    "thread_position_in_threadgroup": "own",
    "threadgroup_position_in_grid": "at",
    "thread_position_in_grid": "at * group + own",
    "threads_per_threadgroup": "group",
    "threadgroups_per_grid": "groups",
    "threads_per_grid": "group * groups",
    "simdgroups_per_threadgroup": "group.x * group.y * group.z / 32",
}
# MLX's function is a template, but an OpenCL entry point cannot be one.
ENTRY = """
__attribute__((amdgpu_num_vgpr({words}), amdgpu_waves_per_eu({waves}, {waves})))
__kernel void registers({parameters}, uint3 group, uint3 groups) {{
  uint3 own, at;
  own.x = __builtin_amdgcn_workitem_id_x();
  own.y = __builtin_amdgcn_workitem_id_y();
  own.z = __builtin_amdgcn_workitem_id_z();
  at.x = __builtin_amdgcn_workgroup_id_x();
  at.y = __builtin_amdgcn_workgroup_id_y();
  at.z = __builtin_amdgcn_workgroup_id_z();
  const uint place = own.x + group.x * (own.y + group.y * own.z);
  {instance}({arguments});
}}
"""

_PARAMETER = re.compile(r"(.*?)([&\s])(\w+)\s*\[\[\s*(\w+)[^\]]*\]\]\s*", re.DOTALL)
_INSTANCE = re.compile(r"\btemplate\s+decltype\((.*?)\)[^;]*;", re.DOTALL)
_KERNEL = re.compile(r"\[\[\s*kernel\s*\]\]")
_SIZE = re.compile(r"static_assert\((\(sizeof[^;]*?)\s*<=\s*\d+\s*,[^;]*\);")
_BYTES = re.compile(r"^\s*; threadgroup bytes (\w+)", re.MULTILINE)
_METADATA = re.compile(r"^\s*\.(vgpr_count|vgpr_spill_count):\s*(\d+)", re.MULTILINE)
_CALL = re.compile(r"\b(\w+)@rel32@lo")


class Registers(NamedTuple):
    """The proxy's figures of a kernel: words in a thread's registers, spilled words, bytes of threadgroup memory."""

    words: int
    spilled: int
    threadgroup: int


def registers(text: str, name: str = "program_source", words: int = WORDS) -> Registers:
    """Return the proxy's register counts of a kernel text as MLX generates it, for `words` registers per thread.

    Raises CompileError if it does not compile for the proxy's GPU (it may compile for Metal), or calls undefined
    functions, and ValueError if `ziglang` is not installed or too old.
    """
    assembly = listing(text, name, words)
    counts = {key: int(value) for key, value in _METADATA.findall(assembly)}
    threadgroup = max((int(size, 0) for size in _BYTES.findall(assembly)), default=0)
    return Registers(counts["vgpr_count"], counts["vgpr_spill_count"], threadgroup)


def listing(text: str, name: str = "program_source", words: int = WORDS) -> str:
    """Return the assembly of a kernel text for the proxy's GPU; the kernel is in function `registers`.

    Raises the errors of `registers`.
    """
    source = _compiled(expanded(text, name))
    output = ["-Xclang", "-include-pch", "-Xclang", str(_parsed()), "-S", "-o", "-"]
    assembly, messages = run([*_command(), *output], _with_entry(source, words), name)
    if messages:
        raise CompileError(f"kernel {name} does not compile for the register count:\n{_lines(messages)}")
    if undefined := sorted(set(_CALL.findall(assembly))):
        where = f"{DEFINITIONS.name} must define to count registers"
        raise CompileError(f"kernel {name} calls {', '.join(undefined)}, which {where}")
    return assembly


def _command() -> list[str]:
    return [*language("generic"), *COMMAND]


def _lines(messages: list[Diagnostic]) -> str:
    return "\n".join(f"{each.file}:{each.line}: {each.message}" for each in messages[:5])


def _compiled(text: str) -> str:
    """Translate to OpenCL without uncalled functions, and add notes of the threadgroup memory."""
    source = to_opencl(text).replace("__attribute__((used)) ", "")
    return _SIZE.sub(r'__asm__ volatile("; threadgroup bytes %0" : : "n"(\1));', source)


def _with_entry(source: str, words: int) -> str:
    """Replace the template's instantiation by an entry point that calls the kernel."""
    name, begin, _, _ = next(kernels(source))
    parameters, arguments = [], []
    for each in re.split(r",(?![^<]*>)", source[begin + 1 : closing(source, begin)]):
        found = _PARAMETER.fullmatch(each.strip())
        assert found, each
        type_, sign, argument, attribute = found.groups()
        if attribute != "buffer":
            arguments.append(ATTRIBUTES[attribute])
            continue
        parameters.append(f"{type_}{'*' if sign == '&' else ' '}{argument}")
        arguments.append(f"*{argument}" if sign == "&" else argument)
    instance = _INSTANCE.search(source)
    call = {"instance": instance[1] if instance else name, "arguments": ", ".join(arguments)}
    inlined = _KERNEL.sub("static __attribute__((always_inline))", _INSTANCE.sub("", source))
    return inlined + ENTRY.format(words=words, waves=WAVES, parameters=", ".join(parameters), **call)


@functools.cache
def _parsed() -> Path:
    return precompiled("registers", _command(), f"{LIBRARY}{DEFINITIONS.read_text()}", _compiled(preamble_text()))
