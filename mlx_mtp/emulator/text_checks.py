"""Find constructs in a Metal text that C++ for OpenCL accepts and Metal refuses."""

import re
from collections.abc import Iterator

from .dialect import blanked, closing, kernels, without_comments
from .findings import Finding, place
from .signature import MOST_BUFFERS

_SPACES = "device|threadgroup|threadgroup_imageblock|constant|thread|object_data|ray_data"
_QUALIFIERS = rf"const|volatile|{_SPACES}"
_SCALARS = (
    "auto bool char uchar short ushort int uint long ulong half bfloat float void size_t ptrdiff_t signed unsigned "
    "int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t bfloat16_t float16_t complex64_t"
)
_VECTORS = r"(?:packed_)?(?:bool|char|uchar|short|ushort|int|uint|long|ulong|half|bfloat|float)[234]"
_TEMPLATES = "vec packed_vec simdgroup_matrix atomic _atomic array complex_t"
_NAMED_TYPE = re.compile(r"\b(?:struct|class|typename)\s+(\w+)|\busing\s+(\w+)\s*=|\btypedef\s[^;{}]*?\b(\w+)\s*;")

_WORDS = {
    "goto": "Metal has no goto",
    "double": "Metal has no double",
    "asm": "Metal has no inline assembly",
    "new": "Metal has no new",
    "delete": "Metal has no delete",
    "throw": "Metal has no exceptions",
    "try": "Metal has no exceptions",
    "catch": "Metal has no exceptions",
    "virtual": "Metal has no virtual functions",
    "dynamic_cast": "Metal has no dynamic_cast",
    "typeid": "Metal has no typeid",
    "thread_local": "Metal has no thread_local variables",
    "register": "Metal has no register variables",
}
_RESERVED = ["vertex", "fragment", "object_data", "ray_data", "threadgroup_imageblock", "as_type"]
_WORD = re.compile(rf"\b(?:{'|'.join(_WORDS)})\b")
# As names of variables, parameters or functions.
_RESERVED_NAME = re.compile(rf"\b(?:\w+|[>*&])\s+\b({'|'.join(_RESERVED)})\s*[=;,()\[]")
_COMPONENT = re.compile(r"[\w)\]]\.(s[0-9a-fA-F]{1,4}|lo|hi|even|odd)\b(?!\s*\()")
_METHOD = re.compile(r"(?<![\w:.~])(\w+)\s*\((?:[^(){};]|\([^()]*\))*\)\s*((?:\b\w+\s*)*)\{")
_STRUCT = re.compile(r"\b(?:struct|class)\s+(?:alignas\s*\([^)]*\)\s*)?(\w+)[^;{}()]*(\{)")
_NO_METHOD = re.compile(r"\bstatic\b|\bfriend\b|[:,]\s*$")  # the last alternative is a constructor's initializer
_DEFAULTED = re.compile(r"=\s*$")
_CAPTURES = re.compile(r"(?<![\w\])\[])\s*(\[\s*[^\[\]\s][^\[\]]*\])\s*(?:[({]|mutable\b|->)")
_BEFORE_LAMBDA = re.compile(r"(?:[=(,{};?:!|+\-*/<>]|&&|\breturn)\s*$")


def checked(text: str, name: str) -> list[Finding]:
    """Return the constructs in a text that Metal refuses and OpenCL accepts; lines without `#line` are of `name`."""
    code = without_comments(text)
    found = [check(code) for check in (_words, _components, _lambdas, _buffers, _methods, _without_space)]
    return [Finding(*place(text, index, name), message) for each in found for index, message in each]


def _words(code: str) -> Iterator[tuple[int, str]]:
    for word in _WORD.finditer(code):
        if not (word[0] == "delete" and _DEFAULTED.search(code[: word.start()][-8:])):
            yield word.start(), _WORDS[word[0]]
    for name in _RESERVED_NAME.finditer(code):
        yield name.start(1), f"{name[1]} is a reserved word of Metal"


def _components(code: str) -> Iterator[tuple[int, str]]:
    """Yield (index, message) for OpenCL's names of vector components, unless the text has a field of that name."""
    for found in _COMPONENT.finditer(code):
        if not re.search(rf"(?<!\.)\b{found[1]}\b", code):
            yield found.start(1), f"Metal's vectors have no component {found[1]}"


def _methods(code: str) -> Iterator[tuple[int, str]]:
    """Yield (index, message) for each method without an address space; not constructors, operators, static or friend.

    From Metal 4.1 on its `this` is a generic pointer, so its members do not fit `thread` pointers and references.
    """
    for struct in _STRUCT.finditer(code):
        begin = struct.start(2) + 1
        inside = blanked(code[begin : closing(code, begin - 1)])
        for method in _METHOD.finditer(inside):
            before = inside[: method.start()].rpartition(";")[2].rpartition("}")[2]
            other = method[1] in (struct[1], "alignas", "operator") or _NO_METHOD.search(before)
            if not other and not re.search(rf"\b(?:{_SPACES})\b", method[2]):
                yield begin + method.start(1), f"method {method[1]} of {struct[1]} has no address space"


def _lambdas(code: str) -> Iterator[tuple[int, str]]:
    for lambda_ in _CAPTURES.finditer(code):
        if _BEFORE_LAMBDA.search(code[: lambda_.start(1)][-40:]):
            yield lambda_.start(1), f"a lambda captures variables: {lambda_[1]}"


def _buffers(code: str) -> Iterator[tuple[int, str]]:
    for kernel, parameters, _, _ in kernels(code):
        count = len(re.findall(r"\[\[\s*buffer\(", code[parameters : closing(code, parameters)]))
        if count > MOST_BUFFERS:
            yield parameters, f"{kernel} has {count} buffers; Metal allows {MOST_BUFFERS}"


def _types(code: str) -> str:
    """Return a pattern of the names of types: Metal's, the text's own, and its template parameters."""
    own = {name for names in _NAMED_TYPE.findall(code) for name in names if name}
    templates = {name for name in own if re.search(rf"\b{name}\s*<", code)} | set(_TEMPLATES.split())
    inside = r"(?:[^<>;{}()=]|<[^<>;{}()=]*>)*"
    plain = "|".join(sorted(own | set(_SCALARS.split())))
    return rf"(?:(?:metal::)?(?:{'|'.join(sorted(templates))})\s*<{inside}>|\b(?:{plain}|{_VECTORS}))"


def _without_space(code: str) -> Iterator[tuple[int, str]]:
    """Yield (index, message) for pointers and references that are declared without an address space."""
    type_ = _types(code)
    declarator = re.compile(
        rf"(?P<before>(?:\b(?:{_QUALIFIERS})\s+)*)(?<![\w.])(?P<type>{type_})"
        rf"(?P<after>(?:\s*\b(?:{_QUALIFIERS})\b)*)\s*(?P<sign>[*&]|\(\s*[*&]\s*\w+\s*\)\s*[\[(])"
    )
    for found in declarator.finditer(code):
        if not re.search(rf"\b(?:{_SPACES})\b", found["before"] + found["after"]):
            what = "reference" if "&" in found["sign"] else "pointer"
            yield found.start("sign"), f"a {what} to {found['type']} has no address space"
    pointer = re.compile(rf"\b(?:{_SPACES})\s[\w:<>\s]*?[*&]\s*(?P<sign>[*&])")
    for found in pointer.finditer(code):
        yield found.start("sign"), "a pointer or reference to a pointer has no address space"
