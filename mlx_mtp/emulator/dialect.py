"""Write Metal source as C++ for OpenCL reads it, with every line where it was."""

import re
from collections.abc import Iterator

from .lowering import declarators

MOST_THREADGROUP_BYTES = 32768

COMMENT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
_INSTANCE = re.compile(r"\btemplate\s*\[\[host_name\([^)]*\)\]\]\s*\[\[kernel\]\]")
KERNEL = re.compile(r"(?:\[\[\s*kernel\s*\]\]|\bkernel)\s+void\s+(\w+)\s*(\()")
_ELEMENTS = "bool|char|uchar|short|ushort|int|uint|long|ulong|half|bfloat|float"
_BFLOAT_LITERAL = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+)(?:[eE][-+]?\d+)?)(?:bf|BF)\b")
# Behind a type: a name and arguments, of which the first begins with no type.
_VARIABLE = re.compile(rf"(\s+\w+)\((?!\s*(?:\)|(?:const|thread|device|constant|threadgroup|void|(?:{_ELEMENTS})[234]?)\s))")
_CLASS = re.compile(r"\b(?:struct|class)\s+(\w+)")
_ALIAS = re.compile(
    rf"\busing\s+(\w+)\s*=\s*(?:metal::)?(?:vec\s*<[^;]*>|(?:{_ELEMENTS})[234])\s*;"
    rf"|\btypedef\s+(?:metal::)?(?:vec\s*<[^;]*>|(?:{_ELEMENTS})[234])\s+(\w+)\s*;"
)


def without_comments(text: str) -> str:
    """Replace comments by spaces; strings and line breaks stay."""
    return COMMENT.sub(lambda m: m[0] if m[0][0] == '"' else re.sub(r"[^\n]", " ", m[0]), text)


def closing(text: str, start: int) -> int:
    """Return the index of the bracket that closes the one at `start`; the text's length where none does."""
    pairs = {"(": ")", "{": "}", "[": "]", "<": ">"}
    opening, close = text[start], pairs[text[start]]
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == opening) - (text[i] == close)
        if depth == 0:
            return i
    return len(text)


def kernels(text: str) -> Iterator[tuple[str, int, int, int]]:
    """List (name, index of the opening parenthesis, of the body's opening brace, of its closing one) of each kernel."""
    for found in KERNEL.finditer(text):
        parameters = closing(text, found.start(2))
        begin = text.find("{", parameters)
        if begin >= 0:
            yield found[1], found.start(2), begin, closing(text, begin)


def _threadgroup_variables(text: str, begin: int, end: int) -> Iterator[tuple[int, int, list[tuple[str, str, str]]]]:
    """List the declarations of threadgroup variables in the outermost scope of a kernel's body."""
    depth, i = 0, begin
    while i < end:
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 1 and text.startswith("threadgroup ", i) and text[i - 1] in " \n;{\t":
            stop = text.find(";", i)
            found = declarators(text[i + len("threadgroup ") : stop])
            if found:
                yield i, stop, found
            i = stop
        else:
            i += 1


def _with_storage(text: str) -> str:
    """Make each threadgroup variable a reference to threadgroup memory, and check how much of it a kernel takes."""
    pieces, last = [], 0
    for _, _, begin, end in kernels(text):
        sizes: list[str] = []
        for start, stop, variables in _threadgroup_variables(text, begin, end):
            lines = text.count("\n", start, stop)
            written = []
            for type_, name, extents in variables:
                sizes.append(f"(sizeof({name}_memory) + 15) / 16 * 16")
                written.append(
                    f"using {name}_memory = {type_}{extents}; "
                    f"threadgroup {name}_memory& {name} = *(threadgroup {name}_memory*)0;"
                )
            total = " + ".join(sizes)
            written.append(
                f'static_assert({total} <= {MOST_THREADGROUP_BYTES}, "a kernel has {MOST_THREADGROUP_BYTES} '
                'bytes of threadgroup memory");'
            )
            pieces += [text[last:start], " ".join(written), "\n" * lines]
            last = stop + 1
    return "".join([*pieces, text[last:]])


def _with_made_vectors(text: str) -> str:
    """Write `float4(a, b)` as the call `declared::made<float4>(a, b)`, and `float4 v(a, b);` as its initializer."""
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
    """Drop `thread` from constructors: OpenCL's temporaries are of no address space."""
    names = "|".join(sorted(set(_CLASS.findall(text))))
    return re.sub(rf"\b((?:{names})\s*\([^()]*(?:\([^()]*\)[^()]*)*\))\s*thread\b", r"\1", text) if names else text


def to_opencl(text: str) -> str:
    """Return C++ for OpenCL that clang accepts where Metal's front end accepts `text`, as far as can be."""
    text = _INSTANCE.sub("template", without_comments(text))
    text = _BFLOAT_LITERAL.sub(r"bfloat(\1f)", text)
    return _with_made_vectors(_with_free_constructors(_with_storage(text)))
