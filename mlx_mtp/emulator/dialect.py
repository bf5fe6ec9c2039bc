"""Translate Metal source to C++ for OpenCL; line numbers are unchanged."""

import re
from collections.abc import Iterator

from .lowering import declarators

MOST_THREADGROUP_BYTES = 32768

_COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_INSTANCE = re.compile(r"\btemplate\s*\[\[host_name\([^)]*\)\]\]\s*\[\[kernel\]\]")
_KERNEL = re.compile(r"(?:\[\[\s*kernel\b[^\]]*\]\]|\bkernel)\s+void\s+(\w+)\s*(\()")
_ELEMENTS = "bool|char|uchar|short|ushort|int|uint|long|ulong|half|bfloat|float"
_THREADGROUP = re.compile(r"(?<=[;{}\n])\s*\b(threadgroup)\s")
_NAMESPACE = re.compile(r"\bnamespace\b[^{;]*(\{)")
_INLINE = re.compile(r"(?<![\w>])(?:(?<=[;}\n])|^)([ \t]*(?:static\s+)?)(METAL_FUNC|inline)\b", re.MULTILINE)
_TO_BFLOAT = re.compile(
    r"\bstatic_cast\s*<\s*bfloat(?:16_t)?\s*>\s*\(|(?<!operator )\bbfloat(?:16_t)?\s*\((?!\s*[*&])"
)
_BFLOAT_LITERAL = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?)(?:bf|BF)\b")
# The name and arguments after a type; a parameter list is empty or starts with a type or qualifier.
_PARAMETER = rf"const|thread|device|constant|threadgroup|void|(?:{_ELEMENTS})[234]?"
_VARIABLE = re.compile(rf"(\s+\w+)\((?!\s*(?:\)|(?:{_PARAMETER})\s))")
_NUMBER = re.compile(
    r"(?<![\w.])(?:(?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+)[fF]?(?![\w.])"
    r"|\b(?:INFINITY|NAN|HUGE_VALF|MAXFLOAT|FLT_\w+|M_\w+_F)\b"
)
_CLASS = re.compile(r"\b(?:struct|class)\s+(\w+)")
_ALIAS = re.compile(
    rf"\busing\s+(\w+)\s*=\s*(?:metal::)?(?:vec\s*<[^;]*>|(?:{_ELEMENTS})[234])\s*;"
    rf"|\btypedef\s+(?:metal::)?(?:vec\s*<[^;]*>|(?:{_ELEMENTS})[234])\s+(\w+)\s*;"
)


def without_comments(text: str) -> str:
    """Replace comments by spaces; keep strings and line breaks."""
    return _COMMENT.sub(lambda m: m[0] if m[0][0] == '"' else re.sub(r"[^\n]", " ", m[0]), text)


def closing(text: str, start: int) -> int:
    """Return the index of the bracket that closes the one at `start`; the text's length if there is none."""
    opening, close = text[start], {"(": ")", "{": "}", "[": "]", "<": ">"}[text[start]]
    depth = 0
    for bracket in re.compile(rf"\{opening}|\{close}").finditer(text, start):
        depth += 1 if bracket[0] == opening else -1
        if depth == 0:
            return bracket.start()
    return len(text)


def blanked(code: str, namespaces: bool = True) -> str:
    """Replace preprocessor lines and the contents of braces by spaces; `namespaces`: those of namespaces, too.

    Line breaks and all indices stay.
    """
    code = re.sub(r"^[ \t]*#[^\n]*", lambda m: " " * len(m[0]), code, flags=re.MULTILINE)
    opened = set() if namespaces else {m.start(1) for m in _NAMESPACE.finditer(code)}
    pieces, last = [], 0
    for brace in re.finditer("{", code):
        if brace.start() >= last and brace.start() not in opened:
            end = closing(code, brace.start())
            pieces += [code[last : brace.end()], re.sub(r"[^\n]", " ", code[brace.end() : end])]
            last = end
    return "".join([*pieces, code[last:]])


def kernels(text: str) -> Iterator[tuple[str, int, int, int]]:
    """Yield each kernel's name and the indices of its parameters' `(`, its body's `{` and its body's `}`."""
    for found in _KERNEL.finditer(text):
        parameters = closing(text, found.start(2))
        begin = text.find("{", parameters)
        if begin >= 0:
            yield found[1], found.start(2), begin, closing(text, begin)


def _with_storage(text: str) -> str:
    """Replace threadgroup variables by references, and assert that a kernel's threadgroup memory fits.

    OpenCL allows such variables only in kernels, and its kernels cannot be templates.
    """
    pieces, last = [], 0
    for _, _, begin, end in kernels(text):
        sizes: list[str] = []
        for found in _THREADGROUP.finditer(text, begin, end):
            stop = text.find(";", found.end())
            declaration = text[found.end() : stop]
            plain = not re.search("[=*&]", re.sub(r"\[[^\[\]]*\]", "", declaration))
            if plain and (variables := declarators(declaration)):
                pieces.append(text[last : found.start(1)])
                for type_, variable, extents in variables:
                    memory, address = f"threadgroup {variable}_memory", " + ".join(sizes) or "0"
                    pieces.append(f"using {variable}_memory = {type_} {extents}; ")
                    pieces.append(f"{memory}& {variable} = *({memory}*)({address}); ")
                    sizes.append(f"(sizeof({type_} {extents}) + 15) / 16 * 16")
                message = f"a kernel has at most {MOST_THREADGROUP_BYTES} bytes of threadgroup memory"
                pieces.append(f'static_assert({" + ".join(sizes)} <= {MOST_THREADGROUP_BYTES}, "{message}");')
                pieces.append("\n" * text.count("\n", found.start(1), stop))
                last = stop + 1
    return "".join([*pieces, text[last:]])


def _with_made_vectors(text: str) -> str:
    """Replace `float4(a, b)` and `float4 v(a, b);` by calls of `declared::made<float4>`."""
    names = "|".join(sorted({name for pair in _ALIAS.findall(text) for name in pair if name}))
    plain = rf"(?:{_ELEMENTS})[234]" + (f"|{names}" if names else "")
    found = re.compile(rf"(?<![\w:])(?:metal::)?(?:\b({plain})|\bvec\s*(<))")
    pieces, last = [], 0
    for match in found.finditer(text):
        if match.start() < last or re.search(r"\boperator\s*$", text[: match.start()][-12:]):
            continue
        end = match.end() if match[1] else closing(text, match.start(2)) + 1
        type_ = text[match.start() : end]
        if re.match(r"\(\s*[^&*\s]", text[end : end + 20]) or text.startswith("()", end):
            pieces += [text[last : match.start()], f"declared::made<{type_}>"]
            last = end
        elif (variable := _VARIABLE.match(text, end)) and text.startswith(";", closing(text, variable.end(1)) + 1):
            pieces += [text[last : variable.end(1)], f" = declared::made<{type_}>"]
            last = variable.end(1)
    return "".join([*pieces, text[last:]])


def _with_free_constructors(text: str) -> str:
    """Remove `thread` from constructors, because OpenCL's temporaries have no address space."""
    names = "|".join(sorted(set(_CLASS.findall(text))))
    return re.sub(rf"\b((?:{names})\s*\([^()]*(?:\([^()]*\)[^()]*)*\))\s*thread\b", r"\1", text) if names else text


def _with_uncalled(text: str) -> str:
    """Mark inline functions outside braces, except templates, so that uncalled ones are compiled, too."""
    pieces, last = [], 0
    for found in _INLINE.finditer(blanked(text)):
        if not text[: found.start(2)].rstrip().endswith(">"):
            pieces += [text[last : found.start(2)], "__attribute__((used)) "]
            last = found.start(2)
    return "".join([*pieces, text[last:]])


def with_unknown_numbers(translated: str) -> str:
    """Hide the values of floating-point literals and constants from the compiler.

    Clang does not warn about converting a constant that bfloat represents exactly, but Metal refuses the conversion.
    """
    return _NUMBER.sub(lambda m: f"declared::number({m[0]})", translated)


def plain_instance(text: str) -> str:
    """Return a text whose kernel is instantiated without Metal's attributes, which are no C++."""
    return _INSTANCE.sub("template", text)


def to_opencl(text: str) -> str:
    """Translate Metal source, macros expanded, to C++ for OpenCL that should compile if Metal accepts the source."""
    text = plain_instance(without_comments(text))
    text = _TO_BFLOAT.sub("declared::to_bfloat(", text)
    text = _BFLOAT_LITERAL.sub(r"bfloat(\1f)", text)
    text = _with_uncalled(text)
    return _with_made_vectors(_with_free_constructors(_with_storage(text)))
