"""Follow an answer through its grammar: masks of allowed tokens, and tokens that must or probably follow."""

from collections.abc import Sequence
from time import perf_counter, thread_time
from typing import Any

import numpy as np

from .library import MASK_SECONDS

MOST_REPEATED = 5  # earlier choices in one list of drafts: each needs a mask, and the last ones are seldom right

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


class GrammarError(ValueError):
    """Raised when a grammar cannot constrain an answer further: work above the limits, or a token it forbids."""


class Matcher:
    """The position of one answer in its grammar. One thread at a time may use it.

    parser: llguidance's matcher, at the start. styles: its matchers of `Grammar.styles`, which are copied.
    eos: token ids that end the answer, the usual one first. words: the argument is the numbers of int32 words of the
    tokenizer's masks and of the model's, the attribute that of the model's; words beyond the tokenizer's are zeros,
    which forbid.
    start: number of tokens before the answer. size: number of the answer's tokens that it has followed.
    most: maximum number of `drafts` in a cycle, 0 for none.
    stats: an object to whose `mask_time` the seconds of masks are added, or None.
    """

    def __init__(self, parser: Any, styles: Sequence[Any], eos: tuple[int, ...], words: tuple[int, int]):
        self.eos, self.start, self.size, self.most = eos, 0, 0, 0
        self.stats: Any = None
        self._mask, self.words = np.empty(words[0], np.int32), words[1]
        self._address = self._mask.ctypes.data  # llguidance writes a mask there
        self._parser, self._styles = parser, styles
        self._renew_twins()

    def restart(self) -> None:
        """Return to the start of the answer."""
        self._parser.reset()
        self.size = 0
        self._renew_twins()

    def _renew_twins(self) -> None:
        self._twins, self._unfollowed = [style.deep_copy() for style in self._styles], list[int]()
        self._earlier, self._asked, self._proposed = EarlierChoices(), 0, list[int]()

    def follow(self, tokens: Any) -> None:
        """Follow an answer's new tokens; `tokens` are all, the prompt's too. GrammarError if one is forbidden."""
        self._consume([int(token) for token in tokens[self.start + self.size :]])

    def _consume(self, new: Sequence[int]) -> None:
        """Follow tokens that the grammar applies to; GrammarError if it forbids one."""
        self.size += len(new)
        if self._parser.try_consume_tokens([*new]) < len(new):
            raise self._error("the answer's tokens do not fit the grammar")
        self._unfollowed += new  # by the twins, until they are needed
        self._earlier.follow(new)
        self._asked = 0

    def fill(self, masks: np.ndarray, drafts: Sequence[int] = (), known: int = 0) -> int:
        """Write into row i of int32 [rows, words] the mask of the tokens allowed after the answer and i drafts.

        Rows after a forbidden draft, or after the answer's end, are left as they are: their tokens are not used.
        known: number of first rows that contain their masks already. Returns the number of first drafts that are
        allowed. Raises GrammarError if the work or time of a mask exceeds its limit.
        """
        tic = perf_counter()
        try:
            return self._fill(masks, drafts, known)
        finally:
            if self.stats:
                self.stats.mask_time += perf_counter() - tic

    def _fill(self, masks: np.ndarray, drafts: Sequence[int], known: int) -> int:
        taken = fits = 0
        try:
            for row in range(len(masks)):
                if row >= known:
                    self._fill_row(masks[row])
                    if self.most:
                        self._earlier.note(row, masks[row][: self._mask.size], drafts)
                if row == len(drafts) or not allows(masks[row], drafts[row]):
                    break
                fits += 1
                if drafts[row] in self.eos or not self._parser.try_consume_tokens([drafts[row]]):
                    break
                taken += 1
        finally:
            if taken and not self._parser.rollback(taken):
                raise self._error()
        return fits

    def _fill_row(self, mask: np.ndarray) -> None:
        tic = thread_time()
        self._parser.unsafe_compute_mask_ptr(self._address, self._mask.nbytes)
        if self._parser.is_error():
            raise self._error()
        if (seconds := thread_time() - tic) > MASK_SECONDS:
            raise self._error(f"a mask took {seconds:.1f} s; the limit is {MASK_SECONDS} s: use a simpler grammar")
        own = self._mask.size
        mask[:own], mask[own:] = self._mask, 0

    def drafts(self, most: int) -> list[int]:
        """Return up to `most` tokens that must follow the answer, or that probably follow it.

        The longer of two lists is returned. The first has the tokens that the grammar forces and, where it leaves a
        choice, at most MOST_REPEATED tokens of `EarlierChoices`. The second has the tokens that follow if the text
        keeps the style of its separators. Where the answer must end, its last token is an end-of-text token. The
        tokens are only proposed: masks decide whether each is allowed.
        """
        if self._asked < most:
            if new := self._unfollowed:
                self._twins = [twin for twin in self._twins if twin.try_consume_tokens(new) == len(new)]
                self._unfollowed = []
            own = self._continued(self._parser, most, self._earlier)
            twin = self._continued(self._twins[0], most) if self._twins else []
            self._asked, self._proposed = most, max(own, twin, key=len)
        return self._proposed[:most]

    def _continued(self, parser: Any, most: int, earlier: EarlierChoices | None = None) -> list[int]:
        """Return up to `most` tokens after the position of a parser, which stays: forced ones or earlier choices."""
        ahead, found, left = parser.deep_copy(), list[int](), MOST_REPEATED if earlier else 0
        while True:
            new = ahead.compute_ff_tokens()[: most - len(found)]
            if not new and earlier and left:
                new, left = self._repeated(ahead, earlier, found), left - 1
            found += new
            if not new or len(found) >= most or new[-1] in self.eos or ahead.try_consume_tokens(new) < len(new):
                return found
            if ahead.is_stopped() and not ahead.is_error():
                return [*found, self.eos[0]]

    def _repeated(self, ahead: Any, earlier: EarlierChoices, found: Sequence[int]) -> list[int]:
        """Return [the earlier choice] at the position of a parser, which is after the tokens `found`; [] without."""
        before = found[-1] if found else earlier.newest
        if not earlier.any_after(before):
            return []
        tic = perf_counter()
        ahead.unsafe_compute_mask_ptr(self._address, self._mask.nbytes)
        if self.stats:
            self.stats.mask_time += perf_counter() - tic
        return [] if ahead.is_error() else earlier.after(before, self._mask)

    def _error(self, reason: str = "") -> GrammarError:
        error = self._parser.get_error().strip().partition("\n")[0]
        return GrammarError(f"grammar: {error or reason or 'llguidance stopped'} (after {self.size} tokens)")


def allows(mask: np.ndarray, token: int) -> bool:
    """Return whether a mask, int32 [words], allows a token."""
    return bool(mask[token // 32] >> (token % 32) & 1)
