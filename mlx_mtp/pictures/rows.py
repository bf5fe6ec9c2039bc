"""Represent pictures as tokens of a prompt, and compute the positions of rows before, in and after them.

A row is one token of the prompt. A picture has many, all negative: they are words of its digest, so two prompts have
equal tokens only if they have equal pictures. The first row's word contains the grid, so the places of all pictures
follow from the tokens alone.
"""

import hashlib
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np

from ..machine.errors import one_line

WORDS = 4  # digest words of a picture; row r has word r % WORDS
MOST = 1 << 14  # maximum rows of a picture on each axis
DIGEST = 28  # bytes of the words' digest: 35 bits in the first word, after the grid, and 63 bits in each other word


@dataclass(frozen=True)
class Picture:
    """A picture of a prompt for one model.

    digest: of everything that determines its features. grid: (1, height, width), where height times width is the
    picture's number of rows, its tokens in a prompt. image: the `Image` that is encoded if the features are not
    stored, or None; pictures that differ in it alone are equal.
    """

    digest: bytes
    grid: tuple[int, int, int]
    image: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        assert self.grid[0] == 1, "video is not supported"
        assert all(1 <= side <= MOST for side in self.grid[1:]), self.grid

    @property
    def rows(self) -> int:
        """Number of tokens of the picture in a prompt."""
        return self.grid[1] * self.grid[2]

    @cached_property
    def words(self) -> tuple[int, ...]:
        """The different tokens of the picture, WORDS integers from -2**63 to -1; row r has the one at r % WORDS.

        A picture of fewer rows has only the first ones. They are computed from digest and grid.
        """
        _, height, width = self.grid
        content = repr(self.grid).encode() + self.digest
        bits = int.from_bytes(hashlib.blake2b(content, digest_size=DIGEST).digest())
        values = [((height - 1) << 14 | (width - 1)) << 35 | bits & ((1 << 35) - 1)]
        values += [bits >> (35 + 63 * i) & ((1 << 63) - 1) for i in range(WORDS - 1)]
        return tuple(-1 - value for value in values)[: self.rows]

    @property
    def tokens(self) -> list[int]:
        """The picture's tokens in a prompt, one per row."""
        return list(islice(cycle(self.words), self.rows))


class PictureSpan(NamedTuple):
    """The place of a picture in a sequence of tokens: its first row, its height and width in rows, and its words.

    words: as `Picture.words`; fewer if the tokens end before.
    """

    first: int
    height: int
    width: int
    words: tuple[int, ...]

    @property
    def end(self) -> int:
        """The first row behind the picture."""
        return self.first + self.height * self.width

    @property
    def shift(self) -> int:
        """What this picture adds to the positions of all later rows, 0 or less.

        Its height * width rows take only max(height, width) positions.
        """
        return max(self.height, self.width) - self.height * self.width


Places = tuple[PictureSpan, ...]


def places_in(tokens: Sequence[int]) -> Places:
    """Return the places of a sequence's pictures, by first row; the last picture may be cut at the sequence's end.

    Raises ValueError for other negative tokens, and a picture that is cut before the end of the sequence.
    """
    if min(tokens, default=0) >= 0:
        return ()
    found, row, count = [], 0, len(tokens)
    while row < count:
        if tokens[row] >= 0:
            row += 1
            continue
        sides = (-1 - tokens[row]) >> 35
        height, width = (sides >> 14) + 1, sides % MOST + 1
        present = list(tokens[row : row + height * width])
        words = tuple(present[:WORDS])
        if height > MOST or (row + len(present) < count and len(present) < height * width):
            raise ValueError(f"tokens: the picture at token {row} is incomplete, or is none")
        if present != list(islice(cycle(words), len(present))) or max(words) >= 0:
            raise ValueError(
                f"tokens: the picture at token {row} is not followed by its other rows; expected `Picture.tokens`"
            )
        found.append(PictureSpan(row, height, width, words))
        row += len(present)
    return tuple(found)


def mark_ids(tokens: Iterable[int], mark: int) -> list[int]:
    """Return tokens in which each negative one, a picture's row, is replaced by `mark`; their number is the same."""
    return [token if token >= 0 else mark for token in tokens]


def shift_at(places: Places, row: int) -> int:
    """Return the position of a text row minus its index in the sequence: 0 or less."""
    return sum(place.shift for place in places if place.end <= row)


def edge_after(places: Places, row: int) -> int | None:
    """Return the first index above `row` of a picture's first row, or of the row after a picture; None if none is."""
    return next((edge for place in places for edge in (place.first, place.end) if edge > row), None)


def positions_of(places: Places, begin: int, end: int) -> np.ndarray:
    """Return the rotary positions of rows begin..end-1 on three axes (frame, y, x), int32 [3, end - begin].

    places: all pictures before `end`. A text row has the same position on all axes. Row (y, x) of a picture that
    begins at position p has (p, p + y, p + x); the next row after the picture has p plus the picture's longer side.
    """
    found = np.tile(np.arange(begin, end, dtype=np.int32), (3, 1))
    for place in places:
        found[:, max(place.end - begin, 0) :] += place.shift
        low, high = max(place.first, begin), min(place.end, end)
        if low < high:
            offset, start = np.arange(low, high) - place.first, place.first + shift_at(places, place.first)
            axes = np.stack([np.zeros_like(offset), offset // place.width, offset % place.width])
            found[:, low - begin : high - begin] = start + axes
    return found


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
