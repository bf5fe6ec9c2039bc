"""Find names that both a Metal text and Metal's library or MLX's preamble define.

Clang reports redefinitions and ambiguous calls, but not an overload that hides the library's function.
"""

import re
from collections.abc import Iterator

from .dialect import blanked, kernels, without_comments

_FUNCTION = re.compile(r"(?<![\w:.])(\w+)\s*\((?:[^(){};]|\([^()]*\))*\)\s*(?:const\s*)?[{;]")
_TYPE = re.compile(
    r"\b(?:struct|class|union|enum\s+class|enum)\s+(\w+)|\busing\s+(\w+)\s*=|\btypedef\s[^;]*?\b(\w+)\s*(?:\[[^\]]*\])?;"
)
_MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
# Metal declares types of these names, which are incomplete.
_NUMBERS = "bool|u?char|u?short|u?int|u?long|half|bfloat|float"
_INCOMPLETE = re.compile(
    rf"(?:packed_|vector_)?(?:(?:{_NUMBERS})(?:8|16)|(?:double|quad|u?llong)(?:[234]|8|16))|quad|u?llong|complex|imaginary"
)
_INTERNAL = re.compile(
    r"_|name_|static_assert$|bool_vec$|packed_vec$|made$|Lanes$"
)  # internal names of the declarations


def definitions(code: str, namespaces: bool = True) -> Iterator[tuple[int, str]]:
    """Yield the index and name of each function and type, except kernels, that a text declares outside braces.

    code: the text without comments. namespaces: whether declarations inside namespaces are left out, too.
    """
    own = {name for name, *_ in kernels(code)}
    outside = blanked(code, namespaces)
    for found in _FUNCTION.finditer(outside):
        if found[1] not in own:
            yield found.start(1), found[1]
    for found in _TYPE.finditer(outside):
        yield found.start(), next(filter(None, found.groups()))


def library_names(library: str) -> set[str]:
    """Return the names that the preprocessed library and preamble declare, except our own internal ones."""
    found = {name for _, name in definitions(without_comments(library), namespaces=False)}
    return {name for name in found if not _INTERNAL.match(name)}


def collisions(text: str, expanded: str, names: set[str]) -> Iterator[tuple[str, int, str]]:
    """Yield (text, index, message) for each macro of `text`, or definition in `expanded`, with one of `names`.

    The index is in the text that comes with it. expanded: the same text with its macros expanded. names: as from
    `library_names`.
    """
    macros = ((text, found.start(1), found[1]) for found in _MACRO.finditer(without_comments(text)))
    others = ((expanded, index, name) for index, name in definitions(without_comments(expanded)))
    for where, index, name in (*macros, *others):
        if name in names or _INCOMPLETE.fullmatch(name):
            yield where, index, f"{name} is also a name of Metal's library or of MLX's preamble; rename it"
