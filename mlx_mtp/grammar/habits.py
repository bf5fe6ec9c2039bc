"""Remember what an answer chose where its grammar allowed few tokens, to propose the same at the same place."""

from collections.abc import Sequence

import numpy as np

MOST_ALLOWED, MOST_SHARE = 256, 1 / 32  # tokens of a mask, and their share of all; in strings few choices are repeated


class Habits:
    """The last token that an answer chose at each place, which is the token before together with the mask.

    newest: the answer's last token, -1 before the first one. Only choices under masks that were noted are remembered,
    and only if a mask allows at most MOST_ALLOWED tokens and at most MOST_SHARE of all: as for white space, brackets,
    digits and the words of a list.
    """

    def __init__(self):
        self.newest = -1
        self._chosen: dict[int, dict[int, int]] = {}  # by the token before, and by the hash of the mask
        self._hashes: list[int | None] = []  # of the masks of the next token, and of that after each of `_drafts`
        self._drafts: list[int] = []

    def note(self, row: int, mask: np.ndarray, drafts: Sequence[int]) -> None:
        """Note the mask of the token after the answer and the first `row` of some drafts; forget those of later rows.

        The masks of the rows before must have been noted with the same drafts; else nothing happens.
        """
        if row <= len(self._hashes):
            bits = mask.tobytes()
            allowed = int.from_bytes(bits, "little").bit_count()
            narrow = allowed <= min(MOST_ALLOWED, MOST_SHARE * 8 * len(bits))
            self._hashes[row:], self._drafts[:] = [hash(bits) if narrow else None], drafts[:row]

    def learn(self, new: Sequence[int]) -> None:
        """Follow new tokens of the answer; remember those whose masks were noted."""
        for token in new:
            if self._hashes and (mask := self._hashes[0]) is not None:
                self._chosen.setdefault(self.newest, {})[mask] = token
            right = self._drafts[:1] == [token]
            self._hashes, self._drafts = (self._hashes[1:], self._drafts[1:]) if right else ([], [])
            self.newest = token

    def known(self, before: int) -> bool:
        """Return whether a choice after the token `before` is remembered, under any mask."""
        return before in self._chosen

    def choice(self, before: int, mask: np.ndarray) -> list[int]:
        """Return [the token chosen after the token `before` under this mask]; [] if none is remembered."""
        token = self._chosen.get(before, {}).get(hash(mask.tobytes()))
        return [] if token is None else [token]
