"""Cut a kernel's text to the tokens that it needs, as every launch carries all of it.

MLX writes the text at each call, keeps it in each launch that is recorded, and hashes it whenever one is evaluated.
"""

import functools
import re
from collections.abc import Iterable
from typing import NamedTuple

from ._abbreviate import abbreviated
from ._fold import Values, folded
from ._rename import renamed, renaming

TOKEN = re.compile(
    r'#[^\n]*|"[^"\n]*"|\.?\d(?:[eEpP][+-]|[\w.])*|\w+'
    r"|<<=|>>=|::|\|\||&&|[-+*/%&|^=!<>]=|\+\+|--|->|<<|>>|[^\s\w]"
)
DEFINED = re.compile(r"#define (\w+)|(?:template < [^({;]*> )?struct (\w+)|[^#({=;]*?(\w+) [({=;]")


class Text(str):
    """A text or a name as MLX gets it, and the `whole` as it was written, for a compiler that names lines."""

    whole: str

    @classmethod
    def of(cls, short: str, whole: str) -> "Text":
        """Make the short text of a whole one."""
        text = cls(short)
        text.whole = whole
        return text


class Short(NamedTuple):
    """A kernel's header and body as MLX gets them, and what they call the names that were given."""

    header: Text
    body: Text
    names: dict[str, Text]


def shorten(header: str, body: str, given: Iterable[str] = (), values: Values | None = None) -> Short:
    """Leave out what nothing leads to, comments and white space; give short names to words, macros to phrases.

    given: the names of inputs, outputs and the template. values: of those of the template that mean the same wherever
    they stand; what they decide against goes as well.
    """
    head, source = (folded(tokens(text), values or {}) for text in (header, body))
    kept = [part for each in reached(definitions(head), " ".join(source)) for part in each]
    own = [tuple(part.split(maxsplit=2)[1:]) for part in kept if part.startswith("#define")]
    code = [part for part in kept if part[0] != "#"]
    short, names = renaming([*code, *source, *(name for name, _ in own)], given)
    sections = [[renamed(part, short) for part in parts] for parts in (code, source, *([value] for _, value in own))]
    macros, (code, source, *phrases) = abbreviated(sections, names)
    macros = [*(renamed(name, short) for name, _ in own), *macros]
    lines = [part for part in kept if part.startswith("#include")]
    lines += [f"#define {name} {joined(phrase)}" for name, phrase in zip(macros, phrases, strict=True)]
    return Short(
        Text.of("".join(f"{line}\n" for line in lines) + joined(code), header),
        Text.of(joined(source), body),
        {name: Text.of(renamed(name, short), name) for name in given},
    )


def tokens(text: str) -> list[str]:
    """Split into tokens, without comments; a line of the preprocessor is one."""
    return TOKEN.findall(re.sub(r"//.*", "", text))


def joined(parts: list[str]) -> str:
    """Write tokens with white space only where they would be others without."""
    text, before = "", ""
    for part in parts:
        if before and "#" in (part[0], before[0]):
            text += "\n"
        elif before and _run_together(before, part):
            text += " "
        text, before = text + part, part
    return text + "\n" * (before[:1] == "#")


@functools.cache
def _run_together(before: str, after: str) -> bool:
    return tokens(before + after) != [before, after]


def definitions(parts: list[str]) -> list[list[str]]:
    """Cut a header's tokens into what it defines: macros, constants, types and functions."""
    found: list[list[str]] = [[]]
    depth = 0
    for part, after in zip(parts, [*parts[1:], ""], strict=False):
        found[-1].append(part)
        depth += (part in "([{") - (part in ")]}")
        if depth == 0 and (part[0] == "#" or part == ";" or (part == "}" and after != ";")):
            found.append([])
    return found[:-1]


def defined(definition: list[str]) -> str:
    """Find the name that a definition defines: the last word before its parameters, body or value; "" of none."""
    found = DEFINED.match(" ".join(definition))
    return found[found.lastindex] if found and found.lastindex else ""


def reached(header: list[list[str]], body: str) -> list[list[str]]:
    """Select the definitions whose names stand in the body, or in others that are selected."""
    words = {id(each): set(re.findall(r"\w+", " ".join(each))) for each in header}
    wanted = {"", *re.findall(r"\w+", body)}
    while True:
        used = [each for each in header if defined(each) in wanted]
        more = wanted.union(*(words[id(each)] for each in used))
        if more == wanted:
            return used
        wanted = more
