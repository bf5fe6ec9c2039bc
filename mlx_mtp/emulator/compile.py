"""Compile Metal source to a shared library with clang, cached by content."""

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx

from .lowering import lower_function_constants, lower_literals, lower_threadgroup
from .options import CONTRACTIONS, CompileError, EmulatorOptions
from .signature import ATTRIBUTES, Signature

NATIVE = Path(__file__).parent / "native"
LOWERING = Path(__file__).parent / "lowering.py"  # its text is part of cache keys
MLX_INCLUDE = Path(mx.__file__).parent / "include"
OLDEST_CLANG = 16
# The text of `machine.errors.install`, which this room cannot import; tests/test_extras.py compares them.
INSTALL = "pip install -e '.[emulate]' in the clone of mlx_mtp"

COMMON = ["-std=c++17", "-ffreestanding", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden"]
COMMON += ["-fno-stack-protector", "-fno-math-errno", "-nostdinc++", "-fsigned-char"]
KERNEL = [
    *("-fno-strict-aliasing", "-fwrapv", "-fno-finite-loops", "-fno-threadsafe-statics"),
    *("-gdwarf-4", "-gline-tables-only"),  # the format that faults.py reads
    "-fno-optimize-sibling-calls",  # a fault in a kernel's last call has the kernel's line
    *("-Xclang", "-cl-single-precision-constant"),
    *("-Xclang", "-ffloat16-excess-precision=none"),
    # Uninitialised locals have the same bits in every run.
    "-ftrivial-auto-var-init=pattern",
    # Every access left after optimisation calls the runtime; merged loads would be counted as fewer.
    *("-fno-vectorize", "-fno-slp-vectorize", "-mllvm", "-slp-threshold=1000000"),
    *("-mllvm", "-disable-vector-combine", "-fno-builtin"),
    *("-fsanitize=kernel-address", "-mllvm", "-asan-instrumentation-with-call-threshold=0"),
    *("-mllvm", "-asan-opt-same-temp=0", "-mllvm", "-asan-stack=0"),
    *("-mllvm", "-asan-globals=0", "-mllvm", "-asan-kernel-mem-intrinsic-prefix=1"),
    *("-fsanitize-coverage=trace-pc,no-prune", "-fsanitize=integer-divide-by-zero,shift-exponent,array-bounds"),
    *("-Werror=return-type", "-Wno-everything"),
]
PREFIX = """\
#include <metal_stdlib>
#include "mlx/backend/metal/kernels/utils.h"
#pragma GCC poison double
"""
ENTRY = Path(__file__).with_name("entry.cpp").read_text()


def cache_directory() -> Path:
    """Return the folder of compiled kernels: MLX_MTP_EMULATOR_CACHE, else one in the user's cache directory."""
    if chosen := os.environ.get("MLX_MTP_EMULATOR_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx_mtp" / "emulator"


def version_of(*command: str) -> str:
    """Return a compiler's --version output; "" if it does not run or fails."""
    try:
        return subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def find_zig() -> str:
    """Return the path of the zig program in the `ziglang` package; "" if there is none."""
    package = importlib.util.find_spec("ziglang")
    zig = Path(package.origin).with_name("zig") if package and package.origin else None
    return str(zig) if zig and zig.exists() else ""


@functools.cache
def find_clang() -> tuple[list[str], list[str], str]:
    """Return the compiler's command, the linker's command and the compiler's --version output.

    MLX_MTP_CLANG names a clang; otherwise the system's clang from version 16 on is used, else that of `ziglang`.
    Raises ValueError if there is none, if MLX_MTP_CLANG is older or no clang, and except on Linux on x86-64 or arm64.
    """
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise ValueError(f"the emulator runs on Linux on x86-64 or arm64, not {sys.platform} on {platform.machine()}")
    chosen = os.environ.get("MLX_MTP_CLANG")
    for clang in [chosen] if chosen else filter(None, [shutil.which("clang"), shutil.which("clang++")]):
        version = version_of(clang)
        if clang_major(version) >= OLDEST_CLANG:
            return [clang], [clang, "-shared", "-nostdlib"], version
        if chosen:
            raise ValueError(f"MLX_MTP_CLANG is {chosen!r}; it must be a clang of version {OLDEST_CLANG} or newer")
    if zig := find_zig():
        return [zig, "clang"], [zig, "ld.lld", "-shared"], version_of(zig, "clang")
    raise ValueError(f"no clang {OLDEST_CLANG} or newer: {INSTALL}, or set MLX_MTP_CLANG to one")


def clang_major(version: str) -> int:
    """Return the major version in clang's --version output; 0 if it has none."""
    found = re.search(r"clang version (\d+)", version)
    return int(found[1]) if found else 0


def _run(command: list[str], what: str) -> None:
    # No MAKEFLAGS or the like affect the compiler, and messages are in English.
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if done.returncode:
        raise CompileError(f"{what} does not compile or link:\n{done.stderr.strip()}")


def digest(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:32]


@functools.cache
def directory_digest(directory: Path) -> str:
    files = sorted(p for p in directory.rglob("*") if p.is_file())
    return digest(*(part for p in files for part in (p.relative_to(directory), p.read_text(errors="replace"))))


@contextmanager
def unfinished(target: Path) -> Iterator[Path]:
    """Yield a folder next to `target`; its file `out`, which the block must write, becomes `target` at the end.

    If the block raises, `target` is unchanged. The folder is deleted in both cases.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            yield Path(work)
            os.replace(Path(work) / "out", target)
    except OSError as e:
        e.filename = e.filename or str(target)  # disk-full errors lack a file name
        raise


@functools.cache
def runtime_library() -> Path:
    """Return the path of the emulator's runtime library, built once per version of its source and of clang.

    Raises the errors of `find_clang`, and CompileError if it does not compile.
    """
    clang, link, version = find_clang()
    flags = [*COMMON, "-O2", "-Wno-everything", f"-I{NATIVE / 'include'}"]
    target = cache_directory() / f"runtime-{digest(directory_digest(NATIVE), version, flags)}.so"
    if not target.exists():
        with unfinished(target) as work:
            objects = []
            for source in sorted((NATIVE / "runtime").glob("*.cpp")):
                objects.append(str(work / f"{source.stem}.o"))
                _run([*clang, *flags, "-c", str(source), "-o", objects[-1]], f"the emulator's {source.name}")
            _run([*link, "-o", f"{work}/out", *objects], "the emulator's runtime")
    return target


def _parsed(library: str, command: list[str], version: str) -> Path:
    """Return the lowered library as a precompiled header, made once for all kernels: most of the work for each."""
    target = cache_directory() / f"library-{digest(library, command, version, LOWERING.read_text())}.pch"
    if not target.exists():
        with unfinished(target) as work:
            (work / "library.h").write_text(_lowered(library))
            embedded = ["-Xclang", "-fmodules-embed-all-files"]  # needs no library.h afterwards
            files = ["-x", "c++-header", f"{work}/library.h", "-o", f"{work}/out"]
            _run([*command, *embedded, *files], "the common header")
    return target


def entry_call(signature: Signature) -> str:
    """Return C++ that calls the kernel for one thread, with pointers from `arguments` and the thread's attributes."""
    arguments = []
    for i, p in enumerate(signature.parameters):
        type_ = re.sub(r"\b(constant|device)\b", "", p.declaration.rsplit(" ", 1)[0])
        pointer = f"static_cast<{type_.rstrip('&')}{'*' if p.reference else ''}>(arguments[{i}])"
        arguments.append(f"*{pointer}" if p.reference else pointer)
    arguments += [ATTRIBUTES[a][1] for a in signature.attributes]
    return f"{signature.instance}({', '.join(arguments)})"


def _file(name: str) -> str:
    return name.replace("\\", "/").replace('"', "'")


def _lowered(preprocessed: str, constants: Mapping[str, object] | None = None) -> str:
    return lower_function_constants(lower_literals(lower_threadgroup(preprocessed)), constants or {})


def translation_unit(signature: Signature, source: str, header: str, name: str, options: EmulatorOptions) -> str:
    """Return C++ with the kernel and its entry point; compile errors have the lines of `header` and `source`."""
    file, entry = _file(name), ENTRY.replace("KERNEL_CALL", entry_call(signature))
    # Not macros of the common header, which would have to be parsed again for each order.
    entry = entry.replace("MATRIX_ORDER", options.matrix_order.replace(" ", "_").upper())
    entry = entry.replace("MATRIX_FUSED", str(options.matrix_fused).lower())
    return (
        f'{PREFIX}# 1 "{file}.h"\n{header}\n# 1 "{file} signature"\n{signature.head}'
        f'# 1 "{file}.metal"\n{source}\n}}\n{entry}'
    )


def build(signature: Signature, source: str, header: str, name: str, options: EmulatorOptions) -> Path:
    """Return the path of the kernel's shared library, built unless the cache has it.

    Raises the errors of `find_clang`, and CompileError, which names lines of <name>.h and <name>.metal, or those of
    `#line` directives.
    """
    clang, link, version = find_clang()
    includes = [f"-I{NATIVE / 'include'}", f"-I{MLX_INCLUDE}"]
    fma = CONTRACTIONS[options.fp_contract] if platform.machine() == "x86_64" else []
    bfloat = ["-Xclang", "-fbfloat16-excess-precision=none"] if clang_major(version) >= 17 else []
    contract, optimize = f"-ffp-contract={options.fp_contract}", f"-O{options.optimize}"
    parse = [*clang, *COMMON, *KERNEL, *bfloat, *fma, contract]
    text, constants = translation_unit(signature, source, header, name, options), dict(options.function_constants)
    headers = [directory_digest(NATIVE), directory_digest(MLX_INCLUDE / "mlx/backend/metal/kernels")]
    headers.append(LOWERING.read_text())
    target = cache_directory() / f"{digest(text, parse, optimize, version, headers, sorted(constants.items()))}.so"
    if not target.exists():
        with unfinished(target) as work:
            cpp, preprocessed, made = (str(work / f"kernel.{suffix}") for suffix in ("cpp", "ii", "o"))
            Path(cpp).write_text(text)
            _run([*parse, optimize, *includes, "-E", cpp, "-o", preprocessed], f"kernel {name}")
            library, first_line, kernel = Path(preprocessed).read_text().partition(f'# 1 "{_file(name)}.h"')
            precompiled = _parsed(library.replace(cpp, "kernel.cpp"), parse, version)
            Path(preprocessed).write_text(_lowered(first_line + kernel, constants))
            # Clang refuses a header parsed at another optimisation level, although parsing does not depend on it.
            parsed = ["-Xclang", "-fno-validate-pch", "-include-pch", str(precompiled), "-x", "c++"]
            _run([*parse, optimize, *parsed, "-c", preprocessed, "-o", made], f"kernel {name}")
            _run([*link, "-o", f"{work}/out", made], f"kernel {name}")
    return target
