"""Find what a Metal text has of C++17: Metal 3 is C++14, and C++ for OpenCL is C++17."""

import functools
from pathlib import Path

from .compile import MLX_INCLUDE, NATIVE, PREFIX, directory_digest
from .opencl import Diagnostic, precompiled, run, zig

# The emulator's headers declare Metal's library for plain C++; address spaces do not matter here.
LANGUAGE = ["-x", "c++", "-ffreestanding", "-fno-exceptions", "-fno-rtti", "-nostdinc++", "-Dthreadgroup="]
LANGUAGE += ["-isystem", str(NATIVE / "include"), "-isystem", str(MLX_INCLUDE)]
LANGUAGE += ["-Wno-everything", "-Wc++17-extensions", "-ferror-limit=0", "-fno-caret-diagnostics"]
ACCEPTED = "constexpr if is", "'static_assert' with no message is"  # by Metal, as in MLX's preamble


def beyond_cxx14(translated: str, name: str) -> list[Diagnostic]:
    """Return clang's messages on what is valid in C++17 and not in C++14, except `if constexpr` and bare assertions.

    translated: a text, macros expanded, whose instantiation is plain C++. name: its file.
    """
    found = _messages("14", translated, name)
    errors = [each for each in found if not each.warning]
    # The emulator's headers lack some of Metal's library: such errors do not depend on the standard.
    always = {each[:3] for each in _messages("17", translated, name)} if errors else set()
    extensions = [each for each in found if each.warning and not each.message.startswith(ACCEPTED)]
    return extensions + [each for each in errors if each[:3] not in always]


def _messages(year: str, text: str, name: str) -> list[Diagnostic]:
    before = ["-Xclang", "-include-pch", "-Xclang", str(_parsed(year))]
    return run([*_command(year), *before, "-fsyntax-only"], text, name)[1]


def _command(year: str) -> list[str]:
    return [zig(), "clang", *LANGUAGE, f"-std=gnu++{year}"]


@functools.cache
def _parsed(year: str) -> Path:
    headers = directory_digest(NATIVE), directory_digest(MLX_INCLUDE / "mlx/backend/metal/kernels")
    return precompiled(f"c++{year}", _command(year), f"// {headers}\n", PREFIX)
