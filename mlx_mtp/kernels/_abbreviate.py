"""Define macros for phrases that a kernel's text repeats."""

import re
from collections import Counter
from collections.abc import Iterator

from ._rename import WORD

LONGEST, ROUNDS = 8, 2  # phrases' tokens, and how often they are counted: the second time they may hold macros
KEPT = 0.7  # of what a phrase saves when counted, to be taken after those that overlapped it
DEFINE = len("#define aB \n")
SPACE = 0.4  # of a character, that a word needs beside it on average
# What MLX looks for in a body, where no macro may stand for it.
FOUND_BY_MLX = re.compile(r"#.*|\w+_(?:shape|strides|ndim|(?:in|per)_\w+)")
END = "\n"
FIRST = 0x4E00  # characters from here on stand for tokens


class _Code:
    """Tokens as characters, so that phrases are parts of a string."""

    def __init__(self) -> None:
        self.characters: dict[str, str] = {}
        self.tokens: dict[str, str] = {}
        self.costs: dict[str, float] = {}

    def of(self, token: str) -> str:
        """Find or make a token's character."""
        if token not in self.characters:
            character = self.characters[token] = chr(FIRST + len(self.characters))
            self.tokens[character] = token
            self.costs[character] = len(token) + SPACE * bool(WORD.fullmatch(token))
        return self.characters[token]

    def gain(self, phrase: str, times: int) -> float:
        """Count the characters that a macro saves for a phrase that stands there so often."""
        length = sum(map(self.costs.__getitem__, phrase))
        return (length - 2 - SPACE) * times - length - DEFINE

    def phrases(self, text: str) -> list[tuple[float, str]]:
        """List the phrases of a text that macros would shorten, by what these save."""
        never = "".join(character for character, token in self.tokens.items() if FOUND_BY_MLX.fullmatch(token))
        counts = Counter(
            piece[at : at + length]
            for piece in re.split(f"[{END}{never}]", text)
            for length in range(1, LONGEST + 1)
            for at in range(len(piece) - length + 1)
        )
        gains = ((self.gain(phrase, times), phrase) for phrase, times in counts.items() if times > 1)
        return sorted((each for each in gains if each[0] > 0), reverse=True)


def abbreviated(sections: list[list[str]], names: Iterator[str]) -> tuple[list[str], list[list[str]]]:
    """Put macros in the place of phrases in all sections of tokens: the macros' names, and the sections.

    A section is added for each macro: what it stands for.
    """
    code, macros = _Code(), []
    text = END.join("".join(map(code.of, section)) for section in sections)
    for _ in range(ROUNDS):
        for gain, phrase in code.phrases(text):
            if code.gain(phrase, text.count(phrase)) >= KEPT * gain:
                macros.append(next(names))
                text = text.replace(phrase, code.of(macros[-1])) + END + phrase
    return macros, [[code.tokens[character] for character in line] for line in text.split(END)]
