"""Apply a grammar to a part of an answer: behind its reasoning, or to tool calls where the model begins them."""

import re
from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np

from .matcher import EarlierChoices, Matcher, Proposed, Rows, allows

PATTERN_TAIL = 256  # bytes of the answer in which a pattern is searched


class Gate(NamedTuple):
    """Where in an answer its grammar applies; with the defaults from the first token to the end.

    after:    texts that the answer must contain in this order; the grammar applies after the last one. One of them
              is "awaited" until the answer contains it.
    patterns: `after` are regular expressions; a match counts only if it ends where a token ends.
    opens:    text that may begin the answer instead of the grammar; `after` is awaited only behind it. "": `after` is
              awaited from the start.
    instead:  texts that may begin where the grammar would; the rest of the answer is then free.
    optional: whether the answer may end while a text is awaited.
    repeats:  behind the grammar's end the last text of `after` is awaited again.
    begun:    text before the answer which is the start of what the grammar describes; not with `after`.

    `opens` and those of `instead` must be written with the tokens that the tokenizer has for them.
    """

    after: tuple[str, ...] = ()
    patterns: bool = False
    opens: str = ""
    instead: tuple[str, ...] = ()
    optional: bool = False
    repeats: bool = False
    begun: str = ""


class GatePosition(NamedTuple):
    """A position relative to a gate; it depends on the consumed tokens alone.

    kind:  "first", "start": the grammar or another text begins, at the answer's start or later. "mark": within that
           text. "either": within text with which both start. "free": a text of `after` is awaited. "grammar": the
           grammar applies. "rest": nothing is awaited.
    stage: index of the awaited text. tail: last bytes of the answer, in which it may have begun. mark: in "mark" and
           "either", the remaining tokens of the other text. then: the kind of place behind these.
    """

    kind: str
    stage: int = 0
    tail: bytes = b""
    mark: tuple[int, ...] = ()
    then: str = ""


class GatedMatcher(Matcher):
    """A matcher whose grammar applies where a gate states.

    Where `opens` or a text of `instead` may begin, the grammar's tokens and the first token of that text are allowed.
    Within such a text only its next token is allowed, or also the grammar's where both have begun alike. Where
    neither applies all tokens are allowed, with two exceptions while a text is awaited: the end of text, unless the
    gate is optional, and, without patterns, tokens that contain the end of that text and more, because the grammar
    begins with a token.
    """

    def __init__(self, *how: Any, gate: Gate):
        super().__init__(*how)
        self._gate, vocabulary = gate, self._vocabulary
        texts = [(text, "rest") for text in gate.instead], [(gate.opens, "free")] if gate.opens else []
        later, first = ([(vocabulary.tokens(text), then) for text, then in some] for some in texts)
        self._others = {"start": later, "first": [*first, *later]}
        self._begun = vocabulary.tokens(gate.begun)
        self._place = self._begin()

    def restart(self) -> None:
        """Return to the start of the answer."""
        super().restart()
        self._place = self._begin()

    def follow(self, tokens: Any) -> None:
        """Follow the answer, from its first token that was not followed yet; `tokens` are all, the prompt's too.

        GrammarError if the grammar forbids one where it applies; tokens elsewhere are not checked.
        """
        for token in tokens[self.start + self.size :]:
            self._step(int(token))

    def _fill(self, masks: Rows, drafts: Sequence[int], known: int) -> int:
        if self._place.kind == "grammar" and not self._gate.repeats:
            return super()._fill(masks, drafts, known)
        ahead, fits = copy(self), 0
        ahead._parser, ahead._twins, ahead._unfollowed = self._parser.deep_copy(), [], []
        ahead._earlier = EarlierChoices()
        for row, mask in enumerate(masks):
            if row >= known:
                ahead._fill_row(mask)
            if row == len(drafts) or not allows(mask, drafts[row]):
                break
            fits += 1
            if drafts[row] in self.eos:
                break
            ahead._step(drafts[row])
        return fits

    def drafts(self, most: int) -> list[int]:
        """Return up to `most` tokens: where the grammar applies, those of `Matcher.drafts`.

        With `repeats` an end-of-text token at their end is left out. Within `opens` or a text of `instead`, its
        remaining tokens; elsewhere none.
        """
        if self._place.kind == "grammar":
            found = super().drafts(most)
            return found[:-1] if self._gate.repeats and found[-1:] == [self.eos[0]] else found
        return [*self._place.mark[:most]]

    def tree(self, most: int) -> list[Proposed]:
        """Return up to `most` tokens: where the grammar applies, those of `Matcher.tree`, else those of `drafts`."""
        if self._place.kind == "grammar":
            return super().tree(most)
        return [Proposed(token, row, 1.0) for row, token in enumerate(self.drafts(most))]

    def _begin(self) -> GatePosition:
        self._consume(self._begun)
        self.size = 0
        return GatePosition("free") if self._gate.after and not self._gate.opens else self._start("first")

    def _start(self, kind: str = "start") -> GatePosition:
        return GatePosition(kind if self._others[kind] else "grammar")

    def _fill_row(self, mask: np.ndarray) -> None:
        place = self._place
        if place.kind in ("grammar", "either", *self._others):
            super()._fill_row(mask)
            _set(mask, place.mark[:1], True)
            for tokens, _ in self._others.get(place.kind, ()):
                _set(mask, tokens[:1], True)
        elif place.kind == "mark":
            mask[:] = 0
            _set(mask, place.mark[:1], True)
        else:
            mask[:] = -1
            if place.kind == "free":
                _set(mask, self._forbidden(place), False)

    def _forbidden(self, place: GatePosition) -> list[int]:
        """Return the tokens that are not allowed while a text is awaited."""
        ends = [] if self._gate.optional else [*self.eos]
        if self._gate.patterns:
            return ends
        mark = self._gate.after[place.stage].encode()
        return [*ends, *self._vocabulary.beyond(mark)[_begun(mark, place.tail)]]

    def _step(self, token: int) -> None:
        """Advance by the answer's next token; GrammarError if it belongs to the grammar, which forbids it."""
        place = self._place
        if place.kind in self._others:
            found = [
                GatePosition("either", mark=ids, then=then)
                for ids, then in self._others[place.kind]
                if ids[0] == token
            ]
            place = found[0] if found else GatePosition("grammar")
        if place.kind == "either":
            place = self._either(place, token)
        if place.kind == "grammar":
            self._consume([token])
            if self._gate.repeats and self._parser.is_stopped() and not self._parser.is_error():
                self._parser.reset()
                self._renew_twins()
                place = GatePosition("free", len(self._gate.after) - 1)
            self._place = place
            return
        if place.kind == "either":
            self._consume([token])
            self._place = place._replace(mark=place.mark[1:])
            return
        self.size += 1
        if place.kind == "mark":
            self._place = place._replace(mark=place.mark[1:]) if place.mark[1:] else GatePosition(place.then)
        elif place.kind == "free":
            self._place = self._behind(place, token)

    def _either(self, place: GatePosition, token: int) -> GatePosition:
        """Return the place before the next token, of kind "either" only if that may belong to both texts.

        Else "grammar" if the token is not the other text's next one, or "mark" if it is its last one or the grammar
        forbids it; the grammar is then returned to its start.
        """
        if token != place.mark[0]:
            return GatePosition("grammar")
        if len(place.mark) > 1 and self._fits(token):
            return place
        self._parser.reset()  # its part of the answer has not begun
        self._renew_twins()
        return place._replace(kind="mark")

    def _fits(self, token: int) -> bool:
        """Return whether the grammar allows a token."""
        mask = np.empty(self.words, np.int32)
        super()._fill_row(mask)
        return allows(mask, token)

    def _behind(self, place: GatePosition, token: int) -> GatePosition:
        """Return the place behind a token while a text is awaited."""
        text = place.tail + self._vocabulary.own.decode_bytes([token])
        mark, stage = self._gate.after[place.stage].encode(), place.stage
        if self._gate.patterns:
            end, keep = next((m.end() for m in re.finditer(mark, text) if m.end() == len(text)), -1), PATTERN_TAIL
        else:
            end, keep = text.find(mark) + len(mark) if mark in text else -1, len(mark) - 1
        if end < 0:
            return place._replace(tail=text[-keep:] if keep else b"")
        stage += 1
        return GatePosition("free", stage, text[end:]) if stage < len(self._gate.after) else self._start()


def _set(mask: np.ndarray, tokens: Sequence[int], allowed: bool) -> None:
    """Set the bits of tokens in a mask, int32 [words], in place: to 1 if they are allowed, else to 0."""
    bits = mask.view(np.uint32)
    for token in tokens:
        bit = np.uint32(1 << token % 32)
        bits[token // 32] = bits[token // 32] | bit if allowed else bits[token // 32] & ~bit


def _begun(mark: bytes, text: bytes) -> int:
    """Return the length of the longest end of a text that is a start of `mark`, but not all of it; 0 without one."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if mark.startswith(text[-n:])), 0)
