"""Store an answer's choices where its grammar allowed few tokens, to propose each one again in an equal situation."""

from collections.abc import Sequence

import numpy as np

MOST_ALLOWED = 256  # tokens of a mask; under wider masks, as in strings, choices are seldom repeated
MOST_SHARE = 1 / 32  # of a mask's bits that are set


class EarlierChoices:
    """For each pair of a token and the mask of the token after it, the last token that an answer chose there.

    newest: the answer's last token, -1 before the first one. A choice is stored if its mask was noted and allows at
    most MOST_ALLOWED tokens and MOST_SHARE of its bits: white space, brackets, words of a list, but no free text.
    """

    def __init__(self):
        self.newest = -1
        self._chosen: dict[int, dict[int, int]] = {}  # by the token before, then by the hash of the mask
        self._hashes: list[int | None] = []  # of the next token's mask and the masks after each of `_drafts`
        self._drafts: list[int] = []

    def note(self, row: int, mask: np.ndarray, drafts: Sequence[int]) -> None:
        """Note the mask, int32 [words], of the token after the answer and the first `row` of `drafts`.

        Masks that were noted for later rows are dropped. Nothing happens unless the masks of all rows before are
        noted, which must be those with the same drafts.
        """
        if row <= len(self._hashes):
            bits = mask.tobytes()
            allowed = int.from_bytes(bits, "little").bit_count()
            few = allowed <= min(MOST_ALLOWED, MOST_SHARE * 8 * len(bits))
            self._hashes[row:], self._drafts[:] = [hash(bits) if few else None], drafts[:row]

    def follow(self, new: Sequence[int]) -> None:
        """Append new tokens to the answer; store those whose masks were noted."""
        for token in new:
            if self._hashes and (mask := self._hashes[0]) is not None:
                self._chosen.setdefault(self.newest, {})[mask] = token
            right = self._drafts[:1] == [token]
            self._hashes, self._drafts = (self._hashes[1:], self._drafts[1:]) if right else ([], [])
            self.newest = token

    def any_after(self, before: int) -> bool:
        """Return whether a choice after the token `before` is stored, with any mask."""
        return before in self._chosen

    def after(self, before: int, mask: np.ndarray) -> list[int]:
        """Return [the stored choice] after the token `before` under a mask; [] if there is none."""
        token = self._chosen.get(before, {}).get(hash(mask.tobytes()))
        return [] if token is None else [token]
