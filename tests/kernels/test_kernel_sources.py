"""Check requirements of Apple's compiler that the emulator's clang does not check."""

import re
from pathlib import Path

import pytest

FILES = sorted(p for p in (Path(__file__).parents[2] / "kernels").iterdir() if p.suffix in (".h", ".metal"))
METHOD = re.compile(r"^  (?:template <[^>]*>\s+)?METAL_FUNC [^;{]*?\)([^;{)]*)\{", re.MULTILINE)
MATHS = re.compile(r"(?<!precise::)(?<!fast::)\b(?:exp|exp2|log|log2|pow|rsqrt|sqrt|sin|cos|tanh)\(")
WIDE_LOADS = re.compile(r"cast<\s*const device (?!Word\b)|\(const device (?:vec|packed_|\w+[234]\b)")
AS_COMPILED = ("delta_gates.h",)  # functions of kernels that mx.compile creates, with the options of ours


def code(path: Path) -> str:
    return re.sub(r"//.*", "", path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_sources_are_ascii(path):
    """MLX passes them to Metal unchanged."""
    assert path.read_text().isascii()


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_methods_are_of_thread_space(path):
    """Otherwise, in Metal 4.1, `this` is in the generic space, and no member is a `thread` pointer or reference."""
    for method in METHOD.finditer(code(path)):
        assert "thread" in method[1].split(), method[0]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_functions_say_how_precise_they_are(path):
    """Otherwise they may be fast ones here, compiled at run time, and precise ones in MLX's library."""
    assert path.name in AS_COMPILED or not MATHS.findall(code(path))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_values_are_loaded_one_by_one(path):
    """A slice may start at any value, where vectors are not aligned; packed weights are aligned words."""
    assert not WIDE_LOADS.findall(code(path))
