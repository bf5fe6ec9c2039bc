"""Check Metal texts on Linux with clang's front end for C++ for OpenCL, from which Metal's was forked.

It parses a text after declarations of Metal's library that contain only what the specification lists (`strict/`).
A pass as C++14 (`cxx14.py`) and checks of the text find what OpenCL accepts and Metal refuses. So it reports errors
of address spaces, types, names and overloads, and what needs C++17. It is not Apple's compiler: a text that passes
here may fail there, and registers, pipelines and results are not checked.
"""

import functools
import re

from .call_graph import may_recurse, recursions
from .collisions import collisions, library_names
from .cxx14 import beyond_cxx14
from .dialect import plain_instance, to_opencl, with_unknown_numbers
from .findings import Finding, place
from .opencl import STRICT, Diagnostic, Spaces, expanded, library_text, read
from .text_checks import checked

_COPY = re.compile("no matching (constructor|conversion)|no viable (overloaded '='|constructor)")
_FROM_CONSTANT = re.compile(r"\(the implicit (?:copy|move) .*cannot bind reference in address space '__constant'")
_ANY_COPY = re.compile(
    r"\(the implicit (?:copy|move) .*(?:address space|lose const|expects an rvalue)|in address space unqualified"
)
_NO_COPY = re.compile("to value of type 'void' changes address space|which does not have a default constructor")
_HALF_TO_BFLOAT = re.compile(r"cast from '[^']*half'.* to '[^']*(?:__bf16|bfloat\w*)'.* is not allowed")
_METAL_WORDS = {
    "__global": "device",
    "__local": "threadgroup",
    "__private": "thread",
    "__constant": "constant",
    "local address space": "threadgroup address space",
    "name_": "",
}


def check(text: str, name: str = "program_source", preamble: bool = True) -> list[Finding]:
    """Return the constructs in `text` that Metal's front end would refuse.

    `text` is a kernel as MLX generates it, with its instantiation. Lines are those of `#line` directives, else those
    of `name`. MLX's preamble precedes the text unless `preamble` is false. The list is empty if nothing is refused.
    Raises ValueError if `ziglang` is not installed or too old, CompileError if its clang fails without a message.
    """
    code = expanded(text, name)
    translated = to_opencl(code)
    assembly, messages = read(translated, name, "generic", preamble=preamble, compiled=may_recurse(translated))
    found = [_finding(each) for each in messages if _counts(each, "generic")] or recursions(assembly)
    lines = {each[:2] for each in found}
    _, messages = read(translated, name, "named", preamble=preamble)
    found += [each for each in (_finding(m) for m in messages if _counts(m, "named")) if each[:2] not in lines]
    if "bfloat" in text:
        _, messages = read(with_unknown_numbers(translated), name, "generic", preamble=preamble)
        found += [_finding(each) for each in messages if each.warning and _counts(each, "generic")]
    found += [_finding(each) for each in beyond_cxx14(plain_instance(code), name)]
    found += [Finding(*place(where, at, name), message) for where, at, message in collisions(text, code, _names())]
    return sorted({*found, *checked(code, name)})


@functools.cache
def _names() -> set[str]:
    return library_names(library_text())


def _finding(each: Diagnostic) -> Finding:
    """Convert clang's message to Metal's words, at the line of the text that causes it."""
    file, line, message = each.file, each.line, each.message
    if file.startswith(str(STRICT)):
        used = [n for n in each.notes if n.message.endswith("requested here") and not n.file.startswith(str(STRICT))]
        file, line = used[0][:2] if used else (file, line)
    message = re.sub(r" \[-W[\w+-]+\]$", "", message)
    if message.startswith("static assertion failed"):
        values = [n.message for n in each.notes if n.message.startswith("expression evaluates")]
        message = "; ".join([message.rpartition("': ")[2], *values[:1]])
    elif message.startswith("no matching"):
        message = "; ".join([message, *(n.message for n in each.notes if n.message.startswith("candidate"))][:2])
    for word, metal in _METAL_WORDS.items():
        message = message.replace(word, metal)
    return Finding(file, line, message)


def _counts(each: Diagnostic, spaces: Spaces) -> bool:
    """Return whether Metal's front end would report this message of clang, too."""
    if each.warning:
        target = each.message.rpartition(" to ")[2]
        return "'double'" in target if "increases" in each.message else "__bf16" in target and "loses" in each.message
    return not (_HALF_TO_BFLOAT.search(each.message) or _is_copy(each, spaces))


def _is_copy(each: Diagnostic, spaces: Spaces) -> bool:
    """Return whether an error concerns the address space of an implicit struct copy, which Metal allows from any
    space.

    Without a generic space clang copies hardly any struct; other errors of copies are found with it.
    """
    if not _COPY.match(each.message):
        return spaces == "named" and bool(_NO_COPY.search(each.message))
    notes = [note.message for note in each.notes]
    tried = [note for note in notes if note.startswith("candidate") and "requires" not in note]
    if spaces == "named":
        return any(_ANY_COPY.search(note) for note in tried)
    return bool(tried) and all(_FROM_CONSTANT.search(note) for note in tried)
