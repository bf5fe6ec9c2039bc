"""Find in a Metal text what C++ for OpenCL accepts, and Metal does not."""

import re
from collections.abc import Iterator

from .dialect import closing, kernels, without_comments
from .findings import Finding, place

MOST_BUFFERS = 31

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
_WORD = re.compile(rf"\b(?:{'|'.join(_WORDS)})\b")
_DEFAULTED = re.compile(r"=\s*$")
_CAPTURES = re.compile(r"(?<![\w\])\[])\s*(\[\s*[^\[\]\s][^\[\]]*\])\s*(?:[({]|mutable\b|->)")
_BEFORE_LAMBDA = re.compile(r"(?:[=(,{};?:!|+\-*/<>]|&&|\breturn)\s*$")


def checked(text: str, name: str) -> list[Finding]:
    """List what `text`, of a kernel of that name, has and Metal does not."""
    code = without_comments(text)
    found = [*_words(code), *_lambdas(code), *_buffers(code), *_without_space(code)]
    return [Finding(*place(text, index, name), message) for index, message in sorted(found)]


def _words(code: str) -> Iterator[tuple[int, str]]:
    for word in _WORD.finditer(code):
        if not (word[0] == "delete" and _DEFAULTED.search(code[: word.start()][-8:])):
            yield word.start(), _WORDS[word[0]]


def _lambdas(code: str) -> Iterator[tuple[int, str]]:
    for lambda_ in _CAPTURES.finditer(code):
        if _BEFORE_LAMBDA.search(code[: lambda_.start(1)][-40:]):
            yield lambda_.start(1), f"a lambda captures variables: {lambda_[1]}"


def _buffers(code: str) -> Iterator[tuple[int, str]]:
    for kernel, parameters, _, _ in kernels(code):
        count = len(re.findall(r"\[\[\s*buffer\(", code[parameters : closing(code, parameters)]))
        if count > MOST_BUFFERS:
            yield parameters, f"{kernel} has {count} buffers; Metal has {MOST_BUFFERS}"


def _types(code: str) -> str:
    """Write an expression for the types that are in no doubt: Metal's, the text's own, and those of its templates."""
    own = {name for names in _NAMED_TYPE.findall(code) for name in names if name}
    templates = {name for name in own if re.search(rf"\b{name}\s*<", code)} | set(_TEMPLATES.split())
    inside = r"(?:[^<>;{}()=]|<[^<>;{}()=]*>)*"
    plain = "|".join(sorted(own | set(_SCALARS.split())))
    return rf"(?:(?:metal::)?(?:{'|'.join(sorted(templates))})\s*<{inside}>|\b(?:{plain}|{_VECTORS}))"


def _without_space(code: str) -> Iterator[tuple[int, str]]:
    """Find pointers and references whose declaration names no address space."""
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
        yield found.start("sign"), "a pointer to a pointer has no address space of its own"
