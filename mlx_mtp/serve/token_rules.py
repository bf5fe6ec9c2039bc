"""Exclude tokens from an answer with logits processors."""

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import mlx.core as mx

from ..decoding.sampling import LogitsProcessor

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

    def processors(self, tokenizer: Any, prompt: int) -> list[LogitsProcessor]:
        """Return logits processors, [] if none is needed, that apply the rules after a prompt of `prompt` tokens.

        Ending at `stop_tokens` is left to the caller.
        """
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
    """Return a logits processor that excludes these tokens at positions below `before`, counted with the prompt."""
    ids = mx.array(sorted(tokens), mx.int32)
    return lambda tokens, logits: masked(logits, ids) if ids.size and tokens.shape[0] < before else logits


def _only(tokens: Collection[int]) -> LogitsProcessor:
    """Return a logits processor that excludes all tokens except these."""
    ids = mx.array(sorted(tokens), mx.int32)[None]

    def process(tokens: mx.array, logits: mx.array) -> mx.array:
        kept = mx.take_along_axis(logits, ids, axis=-1)
        return mx.put_along_axis(mx.full(logits.shape, _least(logits), logits.dtype), ids, kept, axis=-1)

    return process


def masked(logits: mx.array, ids: mx.array) -> mx.array:
    """Return logits [1, V] in which those of tokens `ids` [n] are the minimum of the dtype.

    That is finite, so that a row of nothing else still has probabilities.
    """
    return mx.put_along_axis(logits, ids[None], mx.array(_least(logits), logits.dtype), axis=-1)


def _least(logits: mx.array) -> float:
    return mx.finfo(logits.dtype).min


class BadWords:
    """A logits processor that excludes tokens that contain or, in the answer, complete one of `words`.

    prompt: number of the prompt's tokens.
    """

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
            for length in range(1, len(word)):
                if tail.endswith(word[:length]):
                    ids |= self._starting(word[length:])
        ids = {i for i in ids if i < logits.shape[-1]}
        return masked(logits, mx.array(sorted(ids), mx.int32)) if ids else logits

    def _starting(self, text: bytes) -> set[int]:
        """Return the ids of the tokens whose bytes start with `text`."""
        if text not in self._completing:
            texts, first = self._vocabulary
            self._completing[text] = {i for i in first.get(text[0], ()) if texts[i].startswith(text)}
        return self._completing[text]


class Vocabulary(NamedTuple):
    """The bytes of each token, and the ids of the tokens by first byte."""

    texts: list[bytes]
    first: dict[int, list[int]]


@lru_cache(maxsize=2)
def vocabulary(tokenizer: Any) -> Vocabulary:
    """Return the `Vocabulary` of a tokenizer, with each token's bytes as in the middle of a text."""
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
