"""Follow an answer through its grammar: masks of allowed tokens, and the tokens that must follow."""

from collections.abc import Sequence
from time import perf_counter, thread_time
from typing import Any

import numpy as np

from .library import MASK_SECONDS


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
    stats: an object whose `mask_time` the seconds of `fill` are added to, or None.
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

    def follow(self, tokens: Any) -> None:
        """Follow an answer's new tokens; `tokens` are all, the prompt's too. GrammarError if one is forbidden."""
        self._consume([int(token) for token in tokens[self.start + self.size :]])

    def _consume(self, new: Sequence[int]) -> None:
        """Follow tokens that the grammar applies to; GrammarError if it forbids one."""
        self.size += len(new)
        if self._parser.try_consume_tokens([*new]) < len(new):
            raise self._error("the answer's tokens do not fit the grammar")
        self._unfollowed += new  # by the twins, until they are needed

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
        """Return up to `most` tokens that must follow, or that follow if the text keeps the style of its separators.

        Of these two lists the longer one is returned. Where the answer must end, its last token is an end-of-text
        token. The tokens are only proposed: masks decide whether each is allowed.
        """
        if new := self._unfollowed:
            self._twins = [twin for twin in self._twins if twin.try_consume_tokens(new) == len(new)]
            self._unfollowed = []
        own = self._forced(self._parser, most)
        twin = self._forced(self._twins[0], most) if self._twins else []
        return max(own, twin, key=len)

    def _forced(self, parser: Any, most: int) -> list[int]:
        forced = parser.compute_ff_tokens()[:most]
        if len(forced) < most:
            taken = parser.try_consume_tokens(forced)
            if taken == len(forced) and parser.is_stopped() and not parser.is_error():
                forced = [*forced, self.eos[0]]
            if taken and not parser.rollback(taken):
                raise self._error()
        return forced

    def _error(self, reason: str = "") -> GrammarError:
        error = self._parser.get_error().strip().partition("\n")[0]
        return GrammarError(f"grammar: {error or reason or 'llguidance stopped'} (after {self.size} tokens)")


def allows(mask: np.ndarray, token: int) -> bool:
    """Return whether a mask, int32 [words], allows a token."""
    return bool(mask[token // 32] >> (token % 32) & 1)
