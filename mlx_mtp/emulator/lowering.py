"""Rewrite Metal constructs that C++ lacks: threadgroup arrays, half and bfloat literals, function constants."""

import re
from collections.abc import Mapping
from functools import partial

from .options import CompileError

_LINE = re.compile(r'^# (\d+) "([^"]*)".*$', re.MULTILINE)
_ATTRIBUTE = re.compile(r"\[\[\s*threadgroup\(\s*\w+\s*\)\s*\]\]")
_TO_BFLOAT = re.compile(r"\bstatic_cast\s*<\s*bfloat(?:16_t)?\s*>")
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|\bthreadgroup\b')
_LITERAL = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?)(bf|BF|h|H)\b")
_FUNCTION_CONSTANT = re.compile(
    r"^([ \t]*)(?:(?:static|constexpr|const)\s+)*([\w:]+)\s+(\w+)\s*\[\[\s*function_constant\(\s*\w+\s*\)\s*\]\]\s*;",
    re.MULTILINE,
)
# A const member in one version per address space; in C++ these are equal.
_MEMBER = re.compile(r"(constexpr inline[^;{}]*\))(?:\s*const\b)+\s*(\{[^{}]*\})")
_REPEATED = re.compile(r"(constexpr inline[^;{}]*\) const\s*\{[^{}]*\})(\s*)\1")
_MARK, _SIZE = re.compile(r"^\s*#.*$", re.MULTILINE), re.compile(r"\[[^\[\]]*\]")
_BRACKETED = re.compile(r"<[^<>]*>|\([^()]*\)")


def _blanked(text: str) -> str:
    """Replace the preprocessor's line markers, brackets and their contents by underscores."""
    for pattern in (_MARK, _SIZE, _BRACKETED):
        while (found := pattern.sub(lambda m: "_" * len(m[0]), text)) != text:
            text = found
    return text


def _line_of(text: str, at: int) -> str:
    """Return `file:line` of an index in preprocessed text, by the last line marker before that index."""
    *_, last = _LINE.finditer(text, 0, at)
    return f"{last[2]}:{int(last[1]) + text.count(chr(10), last.end(), at) - 1}"


def _declaration_end(text: str, start: int) -> int:
    """Return the index of the `;` of a declaration of threadgroup variables; -1 for pointers and parameters.

    Raises CompileError for an initializer, or for variables and pointers in one declaration.
    """
    end = next((i for i in range(start, len(text)) if text[i] in ";{}"), len(text) - 1)
    plain = _blanked(text[start:end])
    rest = re.sub(r"^(?:[\w\s]|::)*", "", plain)  # the type and a name
    if text[end] != ";" or rest[:1] not in ("", ",", "=") or ")" in plain:
        return -1
    if re.search("[=*&]", plain):
        raise CompileError(
            f"{_line_of(text, start)}: `threadgroup {text[start:end].strip()}`: the emulator supports threadgroup "
            "variables only without an initializer, and pointers only in separate declarations"
        )
    return end


def _split(text: str) -> list[str]:
    """Split at commas outside brackets."""
    commas = [i for i, c in enumerate(_blanked(text)) if c == ","]
    return [text[a:b] for a, b in zip([0, *(i + 1 for i in commas)], [*commas, len(text)], strict=True)]


def declarators(declaration: str) -> list[tuple[str, str, str]]:
    """Parse a declaration such as `T a[2][3], b`: return (type, name, extents) of each variable; [] if that fails."""
    first, *others = _split(re.sub(r"\balignas\s*\([^()]*\)|^\s*#.*$", "", declaration, flags=re.MULTILINE))
    match = re.fullmatch(r"\s*(.*?)\s*\b(\w+)\s*((?:\[.*\])?)\s*", first, re.DOTALL)
    if match is None or not match[1]:
        return []
    found = [(match[1], match[2], match[3])]
    for other in others:
        more = re.fullmatch(r"\s*(\w+)\s*((?:\[.*\])?)\s*", other, re.DOTALL)
        if more is None:
            return []
        found.append((match[1], more[1], more[2]))
    return found


def _storage(declaration: str) -> str:
    """Return C++ for `T a[2][3], b` with storage from the runtime; "" if it cannot be parsed."""
    return " ".join(_from_runtime(type_, array, name) for type_, name, array in declarators(declaration))


def _from_runtime(type_: str, array: str, name: str) -> str:
    # The tag's address distinguishes the instances of a function template.
    return (
        f"using {name}_storage = {type_} {array}; static char {name}_tag; "
        f"auto& {name} = *static_cast<{name}_storage*>("
        f'emulated_threadgroup(&{name}_tag, "{name}", sizeof({name}_storage), sizeof({type_})));'
    )


def lower_threadgroup(text: str) -> str:
    """Return text with every `threadgroup T name[n];` as storage from the runtime, and without the word elsewhere.

    Versions of a const member that differ only in the address space become one.
    `text` is preprocessed source; line numbers are unchanged. CompileError for a declaration that is not supported.
    """
    text = _ATTRIBUTE.sub("", text)
    out, last = [], 0
    for token in _TOKEN.finditer(text):
        if token.group() != "threadgroup" or token.start() < last:
            continue
        out.append(text[last : token.start()])
        last = token.end()
        end = _declaration_end(text, last)
        if end > 0:
            storage = _storage(text[last:end])
            if not storage:
                declared = f"{_line_of(text, last)}: the declaration `threadgroup{text[last:end]}`"
                raise CompileError(f"{declared} cannot be parsed; expected `threadgroup T name[n];`")
            out.append(storage + "\n" * text.count("\n", last, end))
            last = end + 1
    return _merge_members("".join([*out, text[last:]]))


def _merge_members(text: str) -> str:
    text = _MEMBER.sub(r"\1 const \2", text)
    while (merged := _REPEATED.sub(lambda m: m[1] + m[2] + "\n" * m[1].count("\n"), text)) != text:
        text = merged
    return text


def _cast(match: re.Match) -> str:
    digits = match[1] if re.search(r"[.eE]", match[1]) else match[1] + ".0"
    return f"({'half' if match[2] in 'hH' else 'bfloat'}({digits}f))"


def lower_literals(text: str) -> str:
    """Replace `1.5h` and `1.5bf` by casts of float literals, and `static_cast<bfloat>` by calls."""
    return _TO_BFLOAT.sub("metal::to_bfloat", _LITERAL.sub(_cast, text))


def _constant(values: Mapping[str, object], match: re.Match) -> str:
    indent, type_, name = match.groups()
    if name not in values:
        return f"{indent}extern const {type_} {name};"
    value = values[name]
    return f"{indent}constexpr {type_} {name} = {str(value).lower() if isinstance(value, bool) else value};"


def lower_function_constants(text: str, values: Mapping[str, object]) -> str:
    """Define function constants by `values`, by name; one without a value stays undefined, so its use is an error."""
    return _FUNCTION_CONSTANT.sub(partial(_constant, values), text)
