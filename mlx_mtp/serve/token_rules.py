"""Exclude tokens from an answer, and look up the log probabilities of its tokens."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..decoding.logit_rules import BadWords
from ..generate import GenerationResponse
from .answer import TokenLogprob

# How SentencePiece writes a token of one byte, and the letters with which byte-level tokenizers write bytes.
BYTE = re.compile("<0x[0-9A-F]{2}>")
# By name: as an attribute of transformers it is a function or the module, depending on what was imported before.
_slow_tokenizers = import_module("transformers.convert_slow_tokenizer")
BYTES = {letter: byte for byte, letter in _slow_tokenizers.bytes_to_unicode().items()}


class TokenRules(NamedTuple):
    """Rules that exclude tokens from one answer.

    min_tokens: the first `min_tokens` tokens are neither end-of-text tokens nor `stop_tokens`.
    ignore_eos: no token is an end-of-text token. stop_tokens: end the answer, and are not part of its text.
    bad_words: strings that the answer does not contain. allowed: if given, the only tokens besides those that end it.
    """

    min_tokens: int = 0
    ignore_eos: bool = False
    stop_tokens: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    allowed: Sequence[int] = ()

    def arguments(self, tokenizer: Any, prompt: int) -> dict[str, Any]:
        """Return arguments of `LogitRules`, {} if none is needed, that apply the rules after `prompt` tokens.

        Ending at `stop_tokens` is left to the caller.
        """
        ends, found = tokenizer.eos_token_ids, dict[str, Any]()
        if self.allowed:
            found["allowed"] = {*self.allowed, *ends, *self.stop_tokens}
        if self.bad_words:
            found |= {"bad_words": bad_words_of(tokenizer, tuple(self.bad_words)), "prompt": prompt}
        if self.min_tokens > 0:
            found |= {"early": {*ends, *self.stop_tokens}, "until": prompt + self.min_tokens}
        if self.ignore_eos:
            found["banned"] = ends
        return found


NO_RULES = TokenRules()


@lru_cache(maxsize=128)  # more than the default queue has room for
def bad_words_of(tokenizer: Any, words: tuple[str, ...]) -> BadWords:
    """Return the `BadWords` of words, each of one byte or more; cached, so that parsing a request can make them."""
    known, always, given = vocabulary(tokenizer), set[int](), {word.encode() for word in words}
    ranges = dict[bytes, list[tuple[int, int]]]()
    # A word that contains another one is excluded with it. Without these words no token is in two ranges at once.
    given -= {word for word in given if any(each in word for each in given - {word})}
    for word in given:
        always.update(known.containing(word))
        for length in range(max(1, len(word) - known.longest), len(word)):
            if any(found := known.starting(word[length:])):
                ranges.setdefault(word[:length], []).append(found)
    return BadWords(known.texts, known.order, always, ranges, max(map(len, given)))


class TokenBytes:
    """The bytes of each token, and searches in them.

    texts: by id. longest: number of bytes of the longest token. order: the ids in the order of their bytes.
    """

    def __init__(self, texts: list[bytes]):
        self.texts, self.longest = texts, max(map(len, texts), default=0)
        order = sorted(range(len(texts)), key=texts.__getitem__)
        self.order, self._ordered = np.array(order, np.int32), [texts[i] for i in order]
        self._joined, self._ends = b"".join(texts), [*accumulate(map(len, texts))]

    def starting(self, text: bytes) -> tuple[int, int]:
        """Return the range (first, end) of `order` with the tokens whose bytes start with `text`; (0, 0) for none."""
        first = bisect_left(self._ordered, text)
        end = bisect_right(self._ordered, text, first, key=lambda each: each[: len(text)])
        return (first, end) if first < end else (0, 0)

    def containing(self, text: bytes) -> Iterator[int]:
        """Yield the ids of the tokens whose bytes contain `text`, which is not empty."""
        at = self._joined.find(text)
        while at >= 0:
            token = bisect_right(self._ends, at)
            inside = at + len(text) <= self._ends[token]
            if inside:
                yield token
            at = self._joined.find(text, self._ends[token] if inside else at + 1)


@lru_cache(maxsize=2)
def vocabulary(tokenizer: Any) -> TokenBytes:
    """Return the `TokenBytes` of a tokenizer, with each token's bytes as in the middle of a text."""
    pieces: list[str] = [piece or "" for piece in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
    added = {*getattr(tokenizer, "added_tokens_decoder", {})}
    write = _byte_letters if any(piece.startswith("\u0120") for piece in pieces) else _sentence_piece
    return TokenBytes([piece.encode() if i in added else write(piece) for i, piece in enumerate(pieces)])


def _byte_letters(piece: str) -> bytes:
    return b"".join(bytes([BYTES[c]]) if c in BYTES else c.encode() for c in piece)


def _sentence_piece(piece: str) -> bytes:
    return bytes([int(piece[3:5], 16)]) if BYTE.fullmatch(piece) else piece.replace("\u2581", " ").encode()


def token_logprob(tokenizer: Any, response: GenerationResponse, count: int | None) -> TokenLogprob | None:
    """Return log probabilities of a response's token and of the `count` most likely ones, the likeliest first.

    With count 0 only the token's own; None if count is None or the response has no log probabilities.
    """
    if count is None or response.logprobs is None:
        return None
    logprobs = np.array(response.logprobs.astype(mx.float32))
    top = np.argsort(-logprobs, kind="stable")[:count].tolist()
    chosen, *others = (_token(tokenizer, token, float(logprobs[token])) for token in (response.token, *top))
    return TokenLogprob(chosen, tuple(others))


def _token(tokenizer: Any, token: int, logprob: float) -> tuple[str, bytes, float]:
    """Return a token's text, its bytes and its log probability, which is at least -9999: JSON has no infinity."""
    text = tokenizer.decode([token])
    return text, _bytes(tokenizer, token, text), max(logprob, -9999.0)


def _bytes(tokenizer: Any, token: int, text: str) -> bytes:
    """Return the bytes of a token: of its text, or of its vocabulary entry if it is part of a character."""
    piece = tokenizer.convert_ids_to_tokens(token) if "\ufffd" in text else ""
    if BYTE.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    if piece and BYTES.keys() >= set(piece):
        return bytes(BYTES[letter] for letter in piece)
    return text.encode("utf-8", "replace")
