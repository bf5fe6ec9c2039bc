"""Read short texts of kernels: what their macros stand for, their names, and whether they compile."""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from mlx_mtp.emulator import compile as compiling
from mlx_mtp.kernels._rename import ABOUT, OUTSIDE, WORD
from mlx_mtp.kernels._shorten import tokens

DEFINE = re.compile(r"^#define (\w+) (.*)$", re.MULTILINE)
INCLUDE = re.compile(r"^#include .*\n", re.MULTILINE)
INSTANCE = re.compile(r"^template \[\[host_name\(.*?\)\]\] \[\[kernel\]\] decltype\((.*)\) \w+<.*;$", re.MULTILINE)


def macros(text: str) -> dict[str, list[str]]:
    """List the tokens of each macro; none may be defined twice."""
    found = DEFINE.findall(text)
    assert len({name for name, _ in found}) == len(found)
    return {name: tokens(value) for name, value in found}


def expanded(parts: list[str]) -> list[str]:
    """Put in the place of each macro what it is defined as, and leave the preprocessor's lines out."""
    defined = macros("\n".join(part for part in parts if part[0] == "#"))
    return [each for part in parts if part[0] != "#" for each in _expanded(part, defined)]


def _expanded(part: str, defined: dict[str, list[str]]) -> Iterator[str]:
    if part not in defined:
        yield part
    for each in defined.get(part, ()):
        yield from _expanded(each, defined)


def same_but_for_names(whole: list[str], short: list[str]) -> dict[str, str]:
    """Return the short name of each word, where both are the same tokens but for the names of words of ours."""
    assert len(whole) == len(short)
    pairs = set(zip(whole, short, strict=True))
    assert len(pairs) == len({before for before, _ in pairs}) == len({after for _, after in pairs})
    for before, after in pairs:
        if before != after:
            assert WORD.fullmatch(before)
            assert before not in OUTSIDE
            about = ABOUT.fullmatch(after)
            assert re.fullmatch("[A-Za-z]|[a-z][A-Z]", about[1] if about else after)
            assert not about or before.endswith(about[2])
    return dict(pairs)


def checked(texts: Iterable[str]) -> None:
    """Let clang read kernels as MLX writes them, each in a namespace of its own; AssertionError with what it says."""
    clang, _, _ = compiling.find_clang()
    command = [*clang, *compiling.COMMON, *compiling.KERNEL, "-Xclang", "-fbfloat16-excess-precision=none"]
    includes = [f"-I{compiling.NATIVE / 'include'}", f"-I{compiling.MLX_INCLUDE}"]
    with tempfile.TemporaryDirectory() as folder:
        source, lowered = (Path(folder) / name for name in ("texts.cpp", "lowered.cpp"))
        source.write_text(compiling.PREFIX + "".join(_apart(i, text) for i, text in enumerate(texts)))
        read = subprocess.run([*command, *includes, "-E", str(source)], capture_output=True, text=True, check=True)
        lowered.write_text(compiling._lowered(read.stdout))
        done = subprocess.run([*command, "-fsyntax-only", str(lowered)], capture_output=True, text=True)
    assert not done.returncode, done.stderr


def _apart(number: int, text: str) -> str:
    inside = INSTANCE.sub(r"auto* const launched = \1;", INCLUDE.sub("", text))
    ends = "".join(f"#undef {name}\n" for name in macros(text))
    return f"{''.join(INCLUDE.findall(text))}namespace kernel_{number} {{\n{inside}\n}}\n{ends}"
