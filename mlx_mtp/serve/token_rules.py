"""Rule out tokens of an answer, by logits processors that act on each of its rows."""

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
from transformers import convert_slow_tokenizer

from ..decoding.sampling import LogitsProcessor

# How tokenizers write a token that is one byte, and the letters by which others write each byte.
BYTE = re.compile("<0x[0-9A-F]{2}>")
BYTES = {letter: byte for byte, letter in convert_slow_tokenizer.bytes_to_unicode().items()}


class TokenRules(NamedTuple):
    """Rules for the tokens of one answer.

    min_tokens: number of tokens before which neither an end-of-text token nor one of `stop_tokens` is chosen.
    ignore_eos: no end-of-text token is chosen. stop_tokens: end the answer, without text of their own.
    bad_words: texts that the answer does not contain. allowed: the only tokens beside those that end it; none: all.
    """

    min_tokens: int = 0
    ignore_eos: bool = False
    stop_tokens: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    allowed: Sequence[int] = ()

    def processors(self, tokenizer: Any, prompt: int) -> list[LogitsProcessor]:
        """Logits processors of an answer to a prompt with so many tokens; none where nothing is ruled out."""
        ends, found = tokenizer.eos_token_ids, list[LogitsProcessor]()
        if self.allowed:
            found.append(_only({*self.allowed, *ends, *self.stop_tokens}))
        if self.bad_words:
            found.append(BadWords(tokenizer, self.bad_words, prompt))
        if self.min_tokens > 0:
            found.append(_without({*ends, *self.stop_tokens}, before=prompt + self.min_tokens))
        if self.ignore_eos:
            found.append(_without(ends))
        return found


NO_RULES = TokenRules()


def _without(tokens: Collection[int], before: float = float("inf")) -> LogitsProcessor:
    """Rule out tokens at positions below `before`."""
    ids = mx.array(sorted(tokens), mx.int32)
    return lambda text, logits: masked(logits, ids) if ids.size and text.shape[0] < before else logits


def _only(tokens: Collection[int]) -> LogitsProcessor:
    """Rule out all other tokens."""
    ids = mx.array(sorted(tokens), mx.int32)[None]

    def process(text: mx.array, logits: mx.array) -> mx.array:
        kept = mx.take_along_axis(logits, ids, axis=-1)
        return mx.put_along_axis(mx.full(logits.shape, _least(logits), logits.dtype), ids, kept, axis=-1)

    return process


def masked(logits: mx.array, ids: mx.array) -> mx.array:
    """Give tokens the least logit that there is; it is finite, so that a row without any other has probabilities."""
    return mx.put_along_axis(logits, ids[None], mx.array(_least(logits), logits.dtype), axis=-1)


def _least(logits: mx.array) -> float:
    return mx.finfo(logits.dtype).min


class BadWords:
    """A logits processor that rules out each token with which an answer would contain one of the words."""

    def __init__(self, tokenizer: Any, words: Sequence[str], prompt: int):
        self._vocabulary, self._prompt = vocabulary(tokenizer), prompt
        self._words = [word.encode() for word in words]
        self._longest = max(map(len, self._words))
        inside = re.compile(b"|".join(map(re.escape, self._words)))
        self._always = {i for i, text in enumerate(self._vocabulary.texts) if inside.search(text)}
        self._completing: dict[bytes, set[int]] = {}

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        start = max(self._prompt, tokens.shape[0] - self._longest)
        texts = self._vocabulary.texts
        answer: Any = tokens[start:].tolist()
        tail = b"".join(texts[token] for token in answer if token < len(texts))
        ids = set(self._always)
        for word in self._words:
            for begun in range(1, len(word)):
                if tail.endswith(word[:begun]):
                    ids |= self._starting(word[begun:])
        ids = {i for i in ids if i < logits.shape[-1]}
        return masked(logits, mx.array(sorted(ids), mx.int32)) if ids else logits

    def _starting(self, text: bytes) -> set[int]:
        """The tokens that start with a text."""
        if text not in self._completing:
            every, first = self._vocabulary
            self._completing[text] = {i for i in first.get(text[0], ()) if every[i].startswith(text)}
        return self._completing[text]


class Vocabulary(NamedTuple):
    """The bytes of each token, and the tokens by their first byte."""

    texts: list[bytes]
    first: dict[int, list[int]]


@lru_cache(maxsize=2)
def vocabulary(tokenizer: Any) -> Vocabulary:
    """The bytes that each token of a tokenizer stands for, wherever it stands in a text."""
    pieces: list[str] = [piece or "" for piece in tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))]
    added = {*getattr(tokenizer, "added_tokens_decoder", {})}
    write = _byte_letters if any(piece.startswith("\u0120") for piece in pieces) else _sentence_piece
    texts = [piece.encode() if i in added else write(piece) for i, piece in enumerate(pieces)]
    first: dict[int, list[int]] = {}
    for i, text in enumerate(texts):
        if text:
            first.setdefault(text[0], []).append(i)
    return Vocabulary(texts, first)


def _byte_letters(piece: str) -> bytes:
    return b"".join(bytes([BYTES[c]]) if c in BYTES else c.encode() for c in piece)


def _sentence_piece(piece: str) -> bytes:
    return bytes([int(piece[3:5], 16)]) if BYTE.fullmatch(piece) else piece.replace("\u2581", " ").encode()
