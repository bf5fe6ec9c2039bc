"""Find recursion: candidates by name in a text, and recursive functions in LLVM's assembly."""

import re

from .dialect import closing
from .findings import Finding

_DEFINITION = re.compile(
    r'^define [^\n]*?@("[^"]*"|[\w.$]+)\([^\n]*?(?:!dbg !(\d+) )?\{\n(.*?)^\}', re.MULTILINE | re.DOTALL
)
_FUNCTION = re.compile(
    r"\b(?!(?:if|for|while|switch|return|constexpr)\b)(\w+)\s*\((?:[^(){};]|\([^()]*\))*\)[\w\s]*\{"
)
_NAMED_CALL = re.compile(r"\b(\w+)\s*(?:<[^;{}]*?>)?\s*\(")
_CALL = re.compile(r'\bcall [^\n@]*@("[^"]*"|[\w.$]+)\(')
_SUBPROGRAM = re.compile(
    r'^!(\d+) = (?:distinct )?!DISubprogram\(name: "([^"]*)"[^\n]*?file: !(\d+), line: (\d+)', re.MULTILINE
)
_FILE = re.compile(r'^!(\d+) = !DIFile\(filename: "([^"]*)"', re.MULTILINE)


def may_recurse(code: str) -> bool:
    """Return whether a text may contain recursion, by names alone: overloads and methods count as one function."""
    calls: dict[str, set[str]] = {}
    for found in _FUNCTION.finditer(code):
        body = code[found.end() : closing(code, found.end() - 1)]
        calls.setdefault(found[1], set()).update(_NAMED_CALL.findall(body))
    calls = {name: called & calls.keys() for name, called in calls.items()}
    return any(name in _reached(calls, name) for name in calls)


def recursions(assembly: str) -> list[Finding]:
    """Return a Finding for each function that calls itself, directly or through others, at its definition."""
    defined = {name: (debug, set(_CALL.findall(body))) for name, debug, body in _DEFINITION.findall(assembly)}
    calls = {name: called & defined.keys() for name, (_, called) in defined.items()}
    subprograms = {number: found for number, *found in _SUBPROGRAM.findall(assembly)}
    files = dict(_FILE.findall(assembly))
    found = []
    for name, (debug, _) in defined.items():
        if name in _reached(calls, name):
            function, file, line = subprograms.get(debug, (name, "", "0"))
            found.append(
                Finding(files.get(file, ""), int(line), f"{function} calls itself; Metal allows no recursion")
            )
    return found


def _reached(calls: dict[str, set[str]], start: str) -> set[str]:
    """Return all functions that `start` calls, directly or through others; itself only if it is among them."""
    seen: set[str] = set()
    pending = [start]
    while pending:
        more = calls[pending.pop()] - seen
        seen |= more
        pending += more
    return seen
