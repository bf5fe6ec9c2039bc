"""Run the clang of `ziglang` on C++ for OpenCL after declarations of Metal's library and MLX's preamble."""

import functools
import re
import subprocess
from pathlib import Path
from typing import Literal, NamedTuple

from .compile import (
    INSTALL,
    MLX_INCLUDE,
    cache_directory,
    clang_major,
    digest,
    directory_digest,
    find_zig,
    unfinished,
    version_of,
)
from .dialect import to_opencl
from .options import CompileError

STRICT = Path(__file__).parent / "strict"
PREAMBLE = "mlx/backend/metal/kernels/utils.h"  # the header that MLX puts before a kernel's text
LIBRARY = "#include <metal_stdlib>\n"
OLDEST_CLANG = 22  # the first version with __bf16 for this target
LANGUAGE = ["clang", "-x", "clcpp", "-cl-std=clc++2021", "-cl-no-stdinc", f"-I{STRICT}"]
LANGUAGE += ["-ferror-limit=0", "-fno-caret-diagnostics", "-ftemplate-backtrace-limit=0"]
CHECKS = ["--target=spir64", "-O0", "-Wdouble-promotion", "-Wimplicit-float-conversion"]
CHECKS += ["-Wno-unknown-attributes", "-gline-tables-only"]
# Without the first, variables outside functions need an address space, as in Metal; the others depend on it.
OFF = ("program_scope_global_variables", "pipes", "device_enqueue")
TOLERANT = ["-Xclang", "-fallow-pch-with-compiler-errors"]
# Of headers: a cached file stays valid when they are installed again, as its name has a digest of their contents.
UNDATED = ["-Xclang", "-fno-pch-timestamp"]
# Whether there is a generic address space, or each pointer and reference has a named one.
Spaces = Literal["generic", "named"]

_MLX_INCLUDE = re.compile(r'^#include "(mlx/.*\.h)"$', re.MULTILINE)
_METAL_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*(<metal_\w+>)[ \t]*$", re.MULTILINE)
_DIAGNOSTIC = re.compile(r"^(.*?):(\d+):\d+: (error|fatal error|warning|note): (.*)$")


class Note(NamedTuple):
    """One message of clang."""

    file: str
    line: int
    message: str


class Diagnostic(NamedTuple):
    """An error or warning of clang, with its notes."""

    file: str
    line: int
    message: str
    warning: bool
    notes: list[Note]


@functools.cache
def zig() -> str:
    """Return the path of `ziglang`'s program; ValueError if it is not installed or too old."""
    found = find_zig()
    if found and clang_major(version_of(found, "clang")) >= OLDEST_CLANG:
        return found
    raise ValueError(f"checks of kernel texts need clang 22 or newer, which ziglang>=0.17 has: {INSTALL}")


def language(spaces: Spaces) -> list[str]:
    """Return the start of a clang command for C++ for OpenCL with Metal's library; the caller adds a target."""
    off = OFF if spaces == "generic" else (*OFF, "generic_address_space")
    return [zig(), *LANGUAGE, "-Xclang", "-cl-ext=" + ",".join(f"-__opencl_c_{name}" for name in off)]


def _command(spaces: Spaces) -> list[str]:
    return [*language(spaces), *CHECKS]


def run(command: list[str], text: str, name: str) -> tuple[str, list[Diagnostic]]:
    """Run clang on a text as file `name`; return its output and messages. CompileError if it fails without any."""
    done = subprocess.run([*command, "-"], input=f'#line 1 "{name}"\n{text}', capture_output=True, text=True)
    messages = diagnostics(done.stderr)
    if done.returncode and not messages:
        raise CompileError(f"clang failed on {name}:\n{done.stderr.strip()}")
    return done.stdout, messages


def diagnostics(output: str) -> list[Diagnostic]:
    """Parse clang's errors and warnings, each with its notes."""
    found: list[Diagnostic] = []
    for match in filter(None, map(_DIAGNOSTIC.match, output.splitlines())):
        file, line, kind, message = match[1], int(match[2]), match[3], match[4]
        if kind != "note":
            found.append(Diagnostic(file, line, message, kind == "warning", []))
        elif found:
            found[-1].notes.append(Note(file, line, message))
    return found


def expanded(text: str, name: str) -> str:
    """Return a text with its own macros expanded, or the text itself if clang reports errors or warnings.

    Metal's words and `#include <metal_...>` lines stay.
    """
    kept = _METAL_INCLUDE.sub(r"#pragma metal_include \1", text)
    done, messages = run([zig(), *LANGUAGE, *CHECKS, "-D__METAL__=1", "-D__METAL_VERSION__=320", "-E"], kept, name)
    return re.sub(r"^#pragma metal_include (.*)$", r"#include \1", done, flags=re.MULTILINE) if not messages else text


def read(
    text: str, name: str, spaces: Spaces, *, preamble: bool = True, compiled: bool = False
) -> tuple[str, list[Diagnostic]]:
    """Parse the output of `to_opencl`; return LLVM's assembly ("" without `compiled`) and clang's messages.

    preamble: put the declarations of Metal's library and MLX's preamble before it.
    """
    before = ["-Xclang", "-include-pch", "-Xclang", str(_parsed(spaces))] if preamble else []
    more = ["-S", "-emit-llvm", "-o", "-"] if compiled else ["-fsyntax-only"]
    return run([*_command(spaces), *before, *TOLERANT, *more], text, name)


def preamble_text(header: str = PREAMBLE, seen: set[str] | None = None) -> str:
    """Return MLX's preamble: `header` after the headers that it includes, each once.

    seen: headers to leave out, to which those of the result are added.
    """
    seen = set() if seen is None else seen
    seen.add(header)
    text = (MLX_INCLUDE / header).read_text()
    before = "".join(preamble_text(each, seen) for each in _MLX_INCLUDE.findall(text) if each not in seen)
    own = re.sub(r'^#(include ".*|pragma once)$', "", text, flags=re.MULTILINE)
    return f'{before}#line 1 "{header}"\n{own}\n'


def library_text() -> str:
    """Return Metal's declarations and MLX's preamble, preprocessed."""
    return run([*_command("generic"), "-E"], f"{LIBRARY}{preamble_text()}", "library")[0]


@functools.cache
def _parsed(spaces: Spaces) -> Path:
    return precompiled("front-end", _command(spaces), LIBRARY, to_opencl(preamble_text()))


def precompiled(name: str, command: list[str], headers: str, preamble: str) -> Path:
    """Return the path of the precompiled `headers` and `preamble`, made with `command` unless the cache has it.

    headers, preamble: texts; the second follows the first. name: the start of the file's name.
    """
    version = version_of(zig(), "clang")
    key = digest(headers, preamble, command[1:], UNDATED, TOLERANT, version, directory_digest(STRICT))
    target = cache_directory() / f"{name}-{key}.pch"
    if not target.exists():
        with unfinished(target) as work:
            # Without a generic space clang refuses constructors of MLX's complex numbers; our kernels use none.
            output = ["-c", "-Xclang", "-emit-pch", *UNDATED, *TOLERANT, "-o", f"{work}/out"]
            run([*command, *output], f"{headers}{preamble}", "preamble")
    return target
