"""Read Metal texts with the clang of `ziglang`, as C++ for OpenCL: what it refuses, Apple's front end would refuse too.

It is the front end that Metal's was forked from, behind declarations of Metal's library that hold no more than its
specification has (`strict/`). It finds errors of address spaces, types, names and overloads. It is not Apple's
compiler, which may refuse what passes here, and it says nothing of registers, pipelines or results.
"""

import functools
import re
import subprocess
from pathlib import Path
from typing import Literal, NamedTuple

from .call_graph import may_recurse, recursions
from .collisions import collisions, library_names
from .compile import MLX_INCLUDE, cache_directory, digest, directory_digest, find_zig, unfinished
from .dialect import to_opencl, with_unknown_numbers
from .findings import Finding, place
from .options import CompileError
from .text_checks import checked

STRICT = Path(__file__).parent / "strict"
PREAMBLE = "mlx/backend/metal/kernels/utils.h"  # what MLX puts in front of a kernel's text
COMMAND = ["clang", "--target=spir64", "-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", "-O0"]
COMMAND += ["-Wdouble-promotion", "-Wimplicit-float-conversion", "-ferror-limit=0", "-Wno-unknown-attributes"]
COMMAND += ["-gline-tables-only", "-fno-caret-diagnostics", "-ftemplate-backtrace-limit=1"]
# Without the first, variables outside of functions need a space, as in Metal; it needs the other two to be off.
OFF = ["program_scope_global_variables", "pipes", "device_enqueue"]
TOLERANT = ["-Xclang", "-fallow-pch-with-compiler-errors"]
LIBRARY = "#include <metal_stdlib>\n"
# With a generic address space; without it, so that each pointer has a space of its own; with literals that have no value.
Reading = Literal["generic", "named", "numbers"]
INCLUDE = re.compile(r'^#include "(mlx/.*\.h)"$', re.MULTILINE)
METAL_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(<metal_\w+>)[ \t]*$", re.MULTILINE)
DIAGNOSTIC = re.compile(r"^(.*?):(\d+):\d+: (error|fatal error|warning|note): (.*)$")
COPY_FROM_CONSTANT = re.compile(r"\(the implicit (?:copy|move) .*cannot bind reference in address space '__constant'")
ANY_COPY = re.compile(
    r"\(the implicit (?:copy|move) .*(?:address space|lose const|expects an rvalue)|in address space unqualified"
)
NO_COPY = re.compile("to value of type 'void' changes address space|which does not have a default constructor")
OURS = {"__global": "device", "__local": "threadgroup", "__private": "thread", "__constant": "constant"}


class Diagnostic(NamedTuple):
    """One message of clang, and the notes below it."""

    file: str
    line: int
    kind: str
    message: str
    notes: list[str]


def check(text: str, name: str = "program_source", preamble: bool = True) -> list[Finding]:
    """List what Metal's front end would refuse in `text`: a kernel as MLX generates it, instantiated.

    Lines are those that `#line` directives give, else those of `name`. MLX's preamble stands in front, unless `preamble`
    is false. Raises ValueError where `ziglang` is not installed.
    """
    expanded = _expanded(text, name)
    translated = to_opencl(expanded)
    assembly, messages = _pass(translated, name, preamble, "generic", compiled=may_recurse(translated))
    found = [_finding(each) for each in messages if _counts(each, "generic")] or recursions(assembly)
    lines = {(each.file, each.line) for each in found}
    _, messages = _pass(translated, name, preamble, "named")
    found += [each for each in (_finding(m) for m in messages if _counts(m, "named")) if each[:2] not in lines]
    if "bfloat" in text:
        _, messages = _pass(with_unknown_numbers(translated), name, preamble, "numbers")
        found += [_finding(each) for each in messages if each.kind == "warning" and _counts(each, "numbers")]
    found += [Finding(*place(text, at, name), message) for at, message in collisions(text, _names_of_library())]
    return sorted({*found, *checked(expanded, name)})


@functools.cache
def _zig() -> str:
    if zig := find_zig():
        return zig
    raise ValueError("the Metal front end check needs clang's C++ for OpenCL: pip install ziglang")


def _command(reading: Reading) -> list[str]:
    off = [*OFF, "generic_address_space"] if reading == "named" else OFF
    features = ",".join(f"-__opencl_c_{name}" for name in off)
    return [_zig(), *COMMAND, "-Xclang", f"-cl-ext={features}", f"-I{STRICT}"]


def _run(command: list[str], text: str, name: str) -> tuple[str, list[Diagnostic]]:
    """Compile a text from standard input: what comes out, and the messages."""
    done = subprocess.run([*command, "-"], input=f'#line 1 "{name}"\n{text}', capture_output=True, text=True)
    messages = diagnostics(done.stderr)
    if done.returncode and not messages:
        raise CompileError(f"clang failed on kernel {name}:\n{done.stderr.strip()}")
    return done.stdout, messages


def _expanded(text: str, name: str) -> str:
    """Expand the text's own macros, which hide words from checks of the text; Metal's words and headers stay."""
    kept = METAL_INCLUDE.sub(r"#pragma metal_include \1", text)
    done, messages = _run([_zig(), *COMMAND, "-D__METAL__=1", "-D__METAL_VERSION__=320", "-E"], kept, name)
    return re.sub(r"^#pragma metal_include (.*)$", r"#include \1", done, flags=re.MULTILINE) if not messages else text


def _pass(
    text: str, name: str, preamble: bool, reading: Reading, compiled: bool = False
) -> tuple[str, list[Diagnostic]]:
    """Read a text, and return what it is compiled to, if that is asked for, and the messages."""
    before = ["-Xclang", "-include-pch", "-Xclang", str(_parsed("named" if reading == "named" else "generic"))]
    more = ["-S", "-emit-llvm", "-o", "-"] if compiled else ["-fsyntax-only", *TOLERANT]
    return _run([*_command(reading), *(before if preamble else []), *more], text, name)


def diagnostics(output: str) -> list[Diagnostic]:
    """Read clang's messages, each with its notes."""
    found: list[Diagnostic] = []
    for line in output.splitlines():
        if match := DIAGNOSTIC.match(line):
            file, number, kind, message = match.groups()
            if kind != "note":
                found.append(Diagnostic(file, int(number), kind, message, []))
            elif found:
                found[-1].notes.append(message)
    return found


def _finding(each: Diagnostic) -> Finding:
    message = re.sub("|".join(OURS), lambda m: OURS[m[0]], each.message)
    return Finding(each.file, each.line, message)


def _counts(each: Diagnostic, reading: Reading) -> bool:
    """Whether Metal's front end would object as well."""
    if each.kind == "warning":
        target = each.message.rpartition(" to ")[2]
        return "'double'" in target if "increases" in each.message else "__bf16" in target and "loses" in each.message
    return not _is_copy(each, reading)


def _is_copy(each: Diagnostic, reading: Reading) -> bool:
    """Whether a struct is not copied for want of an address space that OpenCL's implicit copies need, and Metal's do not.

    Without a generic space that is the fate of most structs, and the first reading has found what else is wrong.
    """
    if reading == "named" and NO_COPY.search(each.message):
        return True
    if not re.match("no matching (constructor|conversion)|no viable (overloaded '='|constructor)", each.message):
        return False
    tried = [note for note in each.notes if note.startswith("candidate") and "requires" not in note]
    if reading == "named":
        return any(ANY_COPY.search(note) for note in tried)
    return bool(tried) and all(COPY_FROM_CONSTANT.search(note) for note in tried)


def preamble_text(header: str = PREAMBLE, seen: set[str] | None = None) -> str:
    """Put together MLX's headers as its build does for kernels made at run time: each once, behind what it includes."""
    seen = set() if seen is None else seen
    seen.add(header)
    text = (MLX_INCLUDE / header).read_text()
    before = "".join(preamble_text(each, seen) for each in INCLUDE.findall(text) if each not in seen)
    own = re.sub(r'^#(include ".*|pragma once)$', "", text, flags=re.MULTILINE)
    return f'{before}#line 1 "{header}"\n{own}\n'


@functools.cache
def _parsed(reading: Reading) -> Path:
    """Parse Metal's declarations and MLX's preamble once for all texts, and keep that in the cache."""
    command, text = _command(reading), to_opencl(preamble_text())
    version = subprocess.run([_zig(), "version"], capture_output=True, text=True, check=True).stdout
    target = cache_directory() / f"front-end-{digest(text, command[1:], version, directory_digest(STRICT))}.pch"
    if not target.exists():
        with unfinished(target) as work:
            # Without a generic space clang refuses constructors of MLX's complex numbers, which no kernel of ours has.
            output = ["-c", "-Xclang", "-emit-pch", *TOLERANT, "-o", f"{work}/out"]
            _run([*command, *output], f"{LIBRARY}{text}", "preamble")
    return target


@functools.cache
def _names_of_library() -> set[str]:
    preprocessed, _ = _run([*_command("generic"), "-E"], f"{LIBRARY}{preamble_text()}", "library")
    return library_names(preprocessed)
