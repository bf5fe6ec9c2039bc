"""Replace the marks of pictures in an encoded prompt by the pictures' tokens."""

import operator
from collections.abc import Sequence
from typing import Any

from ..machine.errors import one_line
from .rows import Picture


def place(tokens: Sequence[int], pictures: Sequence[Picture], mark: int) -> list[int]:
    """Return a prompt's tokens, with each token `mark` replaced by the tokens of the next picture.

    Raises ValueError unless there are as many marks as pictures.
    """
    if (marks := tokens.count(mark)) != len(pictures):
        raise ValueError(
            f"the prompt has {marks} marks of pictures for {len(pictures)} pictures; it must have one mark for each"
        )
    rest = iter(pictures)
    return [each for token in tokens for each in (next(rest).tokens if token == mark else (token,))]


def row_of(index: int, tokens: Sequence[int], pictures: Sequence[Picture], mark: int) -> int:
    """Return the index in `place(tokens, pictures, mark)` of the token at `index`, or of a mark's first row there."""
    before = tokens[:index].count(mark)
    return index + sum(picture.rows - 1 for picture in pictures[:before])


def pictures_as_json(pictures: Sequence[Picture]) -> list[Any]:
    """Return a list with [digest in hexadecimal, grid as a list] for each picture, which JSON can express."""
    return [[picture.digest.hex(), list(picture.grid)] for picture in pictures]


def pictures_from_json(content: Sequence[Any]) -> tuple[Picture, ...]:
    """Return the pictures that `pictures_as_json` wrote, without images; ValueError for any other content."""
    found = []
    with one_line("not a list of pictures", (TypeError, ValueError, AssertionError)):
        for digest, (time, height, width) in content:
            grid = operator.index(time), operator.index(height), operator.index(width)
            found.append(Picture(bytes.fromhex(digest), grid))
    return tuple(found)
