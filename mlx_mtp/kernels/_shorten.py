"""Cut a kernel's text to the tokens that it needs, as every launch carries all of it.

MLX writes the text at each call, keeps it in each launch that is recorded, and hashes it whenever one is evaluated.
"""

import functools
import re

TOKEN = re.compile(
    r'#[^\n]*|"[^"\n]*"|\.?\d(?:[eEpP][+-]|[\w.])*|\w+'
    r"|<<=|>>=|::|\|\||&&|[-+*/%&|^=!<>]=|\+\+|--|->|<<|>>|[^\s\w]"
)
DEFINED = re.compile(r"#define (\w+)|(?:template < [^({;]*> )?struct (\w+)|[^#({=;]*?(\w+) [({=;]")


class Text(str):
    """A text as MLX gets it, and the `whole` as it was written, for a compiler that names lines."""

    whole: str


def shorten(header: str, body: str) -> tuple[Text, Text]:
    """Leave out comments, white space, and definitions of the header that nothing in the body leads to."""
    used = reached(definitions(tokens(header)), body)
    short = Text(joined([token for each in used for token in each])), Text(joined(tokens(body)))
    short[0].whole, short[1].whole = header, body
    return short


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
