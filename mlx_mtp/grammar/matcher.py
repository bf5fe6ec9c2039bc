"""Follow an answer through its grammar: masks of allowed tokens, and tokens that must or probably follow."""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import numpy as np

from .library import MASK_SECONDS
from .vocabulary import Vocabulary

MOST_REPEATED = 5  # earlier choices in one list of drafts: each needs a mask, and the last ones are seldom right

MOST_PLACES = 8  # first paths of a tree that may have branches: each needs a mask
BRANCHES = 4  # maximum number of tokens of a choice that are branches
SPELLED = 64  # tokens of a mask that are compared; wider masks are free text
LIKELY = 0.7  # assumed chance of an earlier choice or a usual separator, where the grammar leaves a choice

Rows = np.ndarray | Sequence[np.ndarray]

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
        self._hashes: dict[tuple[int, ...], int] = {}  # of noted masks, by the tokens after the answer

    def note(self, drafts: Sequence[int], mask: np.ndarray) -> None:
        """Note the mask, int32 [words], of the token after the answer and `drafts`."""
        bits = mask.tobytes()
        if int.from_bytes(bits, "little").bit_count() <= min(MOST_ALLOWED, MOST_SHARE * 8 * len(bits)):
            self._hashes[tuple(drafts)] = hash(bits)

    def follow(self, new: Sequence[int]) -> None:
        """Append new tokens to the answer; store those whose masks were noted."""
        for token in new:
            if (mask := self._hashes.get(())) is not None:
                self._chosen.setdefault(self.newest, {})[mask] = token
            self._hashes = {path[1:]: mask for path, mask in self._hashes.items() if path[:1] == (token,)}
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


class Proposed(NamedTuple):
    """A token of a tree of drafts: the row that it continues, and the assumed probability of the path to it."""

    token: int
    parent: int
    probability: float


class Matcher:
    """The position of one answer in its grammar. One thread at a time may use it.

    parser: llguidance's matcher, at the start. styles: its matchers of `Grammar.styles`, which are copied.
    eos: token ids that end the answer, the usual one first. words: the argument is the numbers of int32 words of the
    tokenizer's masks and of the model's, the attribute that of the model's; words beyond the tokenizer's are zeros,
    which forbid. vocabulary: of the tokenizer.
    start: number of tokens before the answer. size: number of the answer's tokens that it has followed.
    most: maximum number of `drafts` in a cycle, 0 for none.
    stats: an object to whose `mask_time` the seconds of masks are added, or None.
    """

    def __init__(
        self, parser: Any, styles: Sequence[Any], eos: tuple[int, ...], words: tuple[int, int], vocabulary: Vocabulary
    ):
        self.eos, self.start, self.size, self.most = eos, 0, 0, 0
        self.stats: Any = None
        self._mask, self.words = np.empty(words[0], np.int32), words[1]
        self._address = self._mask.ctypes.data  # llguidance writes a mask there
        self._parser, self._styles, self._vocabulary = parser, styles, vocabulary
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

    def fill(self, masks: Rows, drafts: Sequence[int] = (), known: int = 0) -> int:
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

    def fill_tree(
        self, masks: np.ndarray, drafts: Sequence[int], parents: Sequence[int], known: Sequence[int]
    ) -> None:
        """Write into row i of int32 [rows, words] the mask after the answer and the drafts on the path to row i.

        drafts, parents: of the rows 1, 2 ..., as in `Drafts`. known: rows that contain their masks already, with all
        rows above them. Other rows are left, and errors raised, as by `fill`.
        """
        done = {*known}
        for row in range(len(masks)):
            if row in parents:
                continue
            path = [row]
            while path[0]:
                path.insert(0, parents[path[0] - 1])
            ready = sum(each in done for each in path)
            self.fill([masks[i] for i in path], [drafts[i - 1] for i in path[1:]], ready)
            done.update(path)

    def _fill(self, masks: Rows, drafts: Sequence[int], known: int) -> int:
        taken = fits = 0
        try:
            for row in range(len(masks)):
                if row >= known:
                    self._fill_row(masks[row])
                    if self.most:
                        self._earlier.note(drafts[:row], masks[row][: self._mask.size])
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

    def tree(self, most: int) -> list[Proposed]:
        """Return a tree of up to `most` tokens that must or may follow the answer, the most probable paths first.

        It has the tokens of `drafts`. Where the grammar leaves a choice of few tokens, each is a branch, followed by
        what it forces. Parents come before their children.
        """
        usual, found, order = tuple(self.drafts(most)), list[Proposed](), count()
        heap: list[Any] = [(-1.0, next(order), (), 0, self._parser)]
        while heap and len(found) < most:
            loss, number, path, row, parser = heappop(heap)
            ahead, new = self._behind_forced(parser, path[-1:], most)
            for token in [*path[-1:], *new][: most - len(found)]:
                found.append(Proposed(token, row, -loss))
                row = len(found)
            if ahead is None or len(found) == most:
                continue
            path += tuple(new)
            likely = usual[len(path) : len(path) + 1] if usual[: len(path)] == path else ()
            for token, chance in self._ways(ahead, path, likely) if number < MOST_PLACES else ():
                heappush(heap, (loss * chance, next(order), (*path, token), row, ahead))
        return found

    def _behind_forced(self, parser: Any, token: tuple[int, ...], most: int) -> tuple[Any, list[int]]:
        """Return a copy of a parser behind `token`, of one or none, and up to `most` tokens that then must follow.

        The copy is behind these, too. None instead of it if nothing may follow.
        """
        ahead = parser.deep_copy()
        if token and (token[0] in self.eos or not ahead.try_consume_tokens([*token])):
            return None, []
        new = ahead.compute_ff_tokens()[:most]
        new = new[: ahead.try_consume_tokens(new)] if new else new
        if not ahead.is_stopped():
            return ahead, new
        return None, new if ahead.is_error() or new[-1:] == [self.eos[0]] else [*new, self.eos[0]]

    def _ways(self, ahead: Any, path: tuple[int, ...], likely: tuple[int, ...]) -> list[tuple[int, float]]:
        """Return the tokens that are branches behind a path, where a parser is, and the assumed chance of each.

        likely: the usual token there, or (): then it is an earlier choice, if there is one.
        """
        self._make_mask(ahead)
        if ahead.is_error():
            return []
        before = path[-1] if path else self._earlier.newest
        likely = likely or tuple(self._earlier.after(before, self._mask))
        others = [token for token in self._different() if token not in likely]
        left = (1 - LIKELY if likely else 1.0) / max(1, len(others))
        return [*((token, LIKELY) for token in likely), *((token, left) for token in others)]

    def _different(self) -> list[int]:
        """Return the tokens of `_mask`, of those that begin alike the longest; [] if they are more than BRANCHES."""
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
        if bits.sum() > SPELLED:
            return []
        texts = {token: self._vocabulary.own.decode_bytes([token]) for token in np.flatnonzero(bits).tolist()}
        ends = [token for token in texts if token in self.eos][:1]
        words = sorted((text, token) for token, text in texts.items() if token not in self.eos)
        following = [text for text, _ in words[1:]] + [b""]
        kept = [token for (text, token), after in zip(words, following, strict=True) if not after.startswith(text)]
        return [*kept, *ends] if len(kept) + len(ends) <= BRANCHES else []

    def _make_mask(self, parser: Any) -> None:
        """Write the mask at the position of a parser to `_mask`."""
        tic = perf_counter()
        parser.unsafe_compute_mask_ptr(self._address, self._mask.nbytes)
        if self.stats:
            self.stats.mask_time += perf_counter() - tic

    def _repeated(self, ahead: Any, earlier: EarlierChoices, found: Sequence[int]) -> list[int]:
        """Return [the earlier choice] at the position of a parser, which is after the tokens `found`; [] without."""
        before = found[-1] if found else earlier.newest
        if not earlier.any_after(before):
            return []
        self._make_mask(ahead)
        return [] if ahead.is_error() else earlier.after(before, self._mask)

    def _error(self, reason: str = "") -> GrammarError:
        error = self._parser.get_error().strip().partition("\n")[0]
        return GrammarError(f"grammar: {error or reason or 'llguidance stopped'} (after {self.size} tokens)")


def allows(mask: np.ndarray, token: int) -> bool:
    """Return whether a mask, int32 [words], allows a token."""
    return bool(mask[token // 32] >> (token % 32) & 1)
