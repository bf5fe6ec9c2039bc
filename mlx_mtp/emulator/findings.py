"""Findings of the checks of a Metal text, and the file and line of an index in it."""

import re
from typing import NamedTuple

_LINE = re.compile(r'^[ \t]*#[ \t]*(?:line[ \t]+)?(\d+)(?:[ \t]+"([^"]*)")?[ \t\d]*$', re.MULTILINE)


class Finding(NamedTuple):
    """A construct that Metal's front end would refuse: file, line and reason."""

    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}"


def place(text: str, index: int, name: str) -> tuple[str, int]:
    """Return the file and line of an index in `text`: line markers and `#line` count, before them lines of `name`."""
    file, line, start = name, 1, 0
    for directive in _LINE.finditer(text, 0, index):
        file, line, start = directive[2] or file, int(directive[1]), directive.end() + 1
    return file, line + text.count("\n", start, index)
