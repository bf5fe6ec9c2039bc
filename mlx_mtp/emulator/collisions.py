"""Find names that a Metal text defines and Metal's library, or MLX's preamble, has as well.

An overload that fits better is chosen without a word, so C++ for OpenCL does not report all of them.
"""

import re
from collections.abc import Iterator

from .dialect import blanked, kernels, without_comments

# What the library has and `strict/` does not declare.
UNDECLARED = set(
    "texture1d texture1d_array texture2d texture2d_array texture2d_ms texture3d texturecube texture_buffer depth2d "
    "sampler access coord address filter mip_filter compare_func matrix float2x2 float3x3 float4x4 half2x2 half3x3 "
    "half4x4 array array_ref tensor uniform make_uniform interpolant patch_control_point command_buffer "
    "visible_function_table intersector intersection_result acceleration_structure ray determinant transpose refract "
    "faceforward fwidth dfdx dfdy discard_fragment async_work swap move forward is_function is_null_texture".split()
)
_FUNCTION = re.compile(r"(?<![\w:.])(\w+)\s*\((?:[^(){};]|\([^()]*\))*\)\s*(?:const\s*)?[{;]")
_TYPE = re.compile(
    r"\b(?:struct|class|union|enum\s+class|enum)\s+(\w+)|\busing\s+(\w+)\s*=|\btypedef\s[^;]*?\b(\w+)\s*(?:\[[^\]]*\])?;"
)
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
_INTERNAL = re.compile(r"_|name_|static_assert$|bool_vec$|packed_vec$|made$|Lanes$")  # of the declarations themselves


def definitions(code: str, namespaces: bool = True) -> Iterator[tuple[int, str]]:
    """List index and name of each function and type that a text without comments declares; those of namespaces not,
    unless their braces are not to be blanked."""
    own = {name for name, *_ in kernels(code)}
    outside = blanked(code, namespaces)
    for found in _FUNCTION.finditer(outside):
        if found[1] not in own:
            yield found.start(1), found[1]
    for found in _TYPE.finditer(outside):
        yield found.start(), next(filter(None, found.groups()))


def library_names(library: str) -> set[str]:
    """Return what Metal's declarations and MLX's preamble, preprocessed, define, and what else Metal's library has."""
    found = {name for _, name in definitions(without_comments(library), namespaces=False)}
    return {name for name in found if not _INTERNAL.match(name)} | UNDECLARED


def collisions(text: str, expanded: str, names: set[str]) -> Iterator[tuple[str, int, str]]:
    """List text, index and message where a macro of `text`, or a function or type of it `expanded`, has a library's name."""
    macros = ((text, found.start(1), found[1]) for found in _MACRO.finditer(without_comments(text)))
    others = ((expanded, index, name) for index, name in definitions(without_comments(expanded)))
    for where, index, name in (*macros, *others):
        if name in names:
            yield where, index, f"{name} is a name of Metal's library or of MLX's preamble as well"
