"""What C++ has no word for: arrays in threadgroup memory, half and bfloat literals, function constants."""

import re

_ATTRIBUTE = re.compile(r"\[\[\s*threadgroup\(\s*\w+\s*\)\s*\]\]")
_TO_BFLOAT = re.compile(r"\bstatic_cast\s*<\s*bfloat(?:16_t)?\s*>")
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|\bthreadgroup\b')
_LITERAL = re.compile(r"(?<![\w.])((?:\d+\.\d*|\.\d+|\d+)(?:[eE][-+]?\d+)?)(bf|BF|h|H)\b")
_FUNCTION_CONSTANT = re.compile(
    r"^([ \t]*)(?:(?:static|constexpr|const)\s+)*([\w:]+)\s+(\w+)\s*\[\[\s*function_constant\(\s*\w+\s*\)\s*\]\]\s*;", re.MULTILINE
)
# What may stand before a declaration's first word.
_STARTS = re.compile(r"(?:[;{}:)]|\belse|\bdo|^\s*#.*)\s*$|^\s*$")


def _declaration_end(text: str, start: int) -> int:
    """Index of the `;` that ends the declaration, or -1 if it is none: a pointer, a parameter, a cast."""
    depth = {"<": 0, "(": 0, "[": 0}
    closing = {">": "<", ")": "(", "]": "["}
    for i in range(start, len(text)):
        c = text[i]
        if c in depth:
            depth[c] += 1
        elif c in closing:
            if depth[closing[c]] == 0:
                return -1
            depth[closing[c]] -= 1
        elif not any(depth.values()):
            if c == ";":
                return i
            if c in "*&={}":
                return -1
    return -1


def _split(text: str) -> list[str]:
    parts, depth, last = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "<([") - (c in ">)]")
        if c == "," and depth == 0:
            parts.append(text[last:i])
            last = i + 1
    return [*parts, text[last:]]


def _storage(declaration: str) -> str:
    """C++ for `T a[2][3], b` that is handed its storage by the runtime."""
    first, *others = _split(declaration)
    match = re.fullmatch(r"\s*(.*?)\s*\b(\w+)\s*((?:\[.*\])?)\s*", first, re.DOTALL)
    if match is None or not match[1]:
        return ""
    declarators = [(match[2], match[3])]
    for other in others:
        more = re.fullmatch(r"\s*(\w+)\s*((?:\[.*\])?)\s*", other, re.DOTALL)
        if more is None:
            return ""
        declarators.append((more[1], more[2]))
    return " ".join(_from_runtime(match[1], array, name) for name, array in declarators)


def _from_runtime(type_: str, array: str, name: str) -> str:
    # The tag's address tells the instances of a function template apart.
    return (
        f"using {name}_storage = {type_} {array}; static char {name}_tag; "
        f"auto& {name} = *static_cast<{name}_storage*>("
        f'emulated_threadgroup(&{name}_tag, "{name}", sizeof({name}_storage), sizeof({type_})));'
    )


def _statement_starts(text: str, at: int) -> bool:
    before = text[max(0, at - 400) : at]
    # A line marker of the preprocessor, or a qualifier of the same declaration, does not count.
    before = re.sub(r"\n#[^\n]*(?=\n)", "", "\n" + before)
    before = re.sub(r"\b(const|volatile|static|alignas\([^()]*\))\s*$", "", before.rstrip() + " ").rstrip()
    return bool(_STARTS.search(before[-80:].rsplit("\n#", 1)[0] if before else ""))


def lower_threadgroup(text: str) -> str:
    """Replaces every `threadgroup T name[n];` by storage from the runtime and drops the word elsewhere.

    `text` is preprocessed source; lines stay where they are.
    """
    text = _ATTRIBUTE.sub("", text)
    out, last = [], 0
    for token in _TOKEN.finditer(text):
        if token.group() != "threadgroup":
            continue
        if token.start() < last:
            continue
        out.append(text[last : token.start()])
        last = token.end()
        end = _declaration_end(text, last) if _statement_starts(text, token.start()) else -1
        storage = _storage(text[last:end]) if end > 0 else ""
        if storage:
            out.append(storage + "\n" * text.count("\n", last, end) if "\n" in text[last:end] else storage)
            last = end + 1
    return "".join([*out, text[last:]])


def lower_literals(text: str) -> str:
    """`1.5h` and `1.5bf` as casts of float literals, and casts to bfloat as calls."""

    def cast(match: re.Match) -> str:
        digits = match[1] if re.search(r"[.eE]", match[1]) else match[1] + ".0"
        return f"({'half' if match[2] in 'hH' else 'bfloat'}({digits}f))"

    return _TO_BFLOAT.sub("metal::to_bfloat", _LITERAL.sub(cast, text))


def lower_function_constants(text: str, values: dict[str, object]) -> str:
    """Function constants as constants; one without a value stays undefined, so that using it is an error."""

    def constant(match: re.Match) -> str:
        indent, type_, name = match.groups()
        if name not in values:
            return f"{indent}extern const {type_} {name};"
        value = values[name]
        return f"{indent}constexpr {type_} {name} = {str(value).lower() if isinstance(value, bool) else value};"

    return _FUNCTION_CONSTANT.sub(constant, text)
