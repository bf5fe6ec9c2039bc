"""Tokenizers for tests of grammars: one of five tokens, and the demo's without its model."""

import functools
import re

import numpy as np

from mlx_mtp import grammar
from mlx_mtp.demo import demo_path
from mlx_mtp.grammar import matcher

LETTERS = ("a", "b", "c", "ab", "<end>")
END = 4


class _Letters:
    """The tokens a, b, c, ab and the end of text: of two ways to write "ab" the one token is the tokenizer's own."""

    eos_token_id, bos_token_id, special_token_ids = END, None, (END,)
    tokens = tuple(text.encode() for text in LETTERS)

    def __call__(self, text):
        text, found = (text.decode() if isinstance(text, bytes) else text), []
        while text:
            found.append(next(i for i in (3, 0, 1, 2) if text.startswith(LETTERS[i])))
            text = text[len(LETTERS[found[-1]]) :]
        return found


@functools.cache
def letters():
    """Return llguidance's tokenizer of LETTERS."""
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Letters()))


@functools.cache
def demo_tokenizer():
    """Return the demo's tokenizer, of 2048 tokens."""
    from mlx_lm.tokenizer_utils import load

    return load(demo_path())


class _Bytes:
    """Every byte as a token, the end of text, and special tokens."""

    eos_token_id, bos_token_id = 256, None

    def __init__(self, special):
        self.tokens = (*(bytes([byte]) for byte in range(256)), b"<end>", *(mark.encode() for mark in special))
        self.special_token_ids = tuple(range(256, len(self.tokens)))

    def __call__(self, text):
        return list(text.encode() if isinstance(text, str) else text)


@functools.cache
def byte_tokenizer(*special):
    """Return llguidance's tokenizer of single bytes and these special tokens, whose ids start at 257."""
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    return LLTokenizer(TokenizerWrapper(_Bytes(special)))


def compiled_bytes(made: grammar.Grammar, *special: str):
    """Return llguidance's matcher of a grammar, of single bytes and these special tokens."""
    return grammar.compiled(made, byte_tokenizer(*special), 257 + len(special)).parser.deep_copy()


def accepted(made: grammar.Grammar, text: str, *special: str, spelled: bool = False) -> str | None:
    """Return None if a text is complete in a grammar of single bytes, else the part that was consumed.

    spelled: special tokens are in the text as their letters.
    """
    tokens: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special and not spelled else [text]:
        tokens += [257 + special.index(part)] if part in special else part.encode()
    parser = compiled_bytes(made, *special)
    taken = parser.try_consume_tokens(tokens)
    return (
        None
        if taken == len(tokens) and parser.is_accepting()
        else byte_tokenizer(*special).decode_str(tokens[:taken])
    )


def constraint(made: grammar.Grammar | grammar.Constraint, vocab_size: int = 2048) -> grammar.Constraint:
    """Return a grammar compiled for the demo's tokenizer, or its own."""
    if isinstance(made, grammar.Constraint):
        return made
    return grammar.compiled(made, None if made.tokenizer is not None else demo_tokenizer(), vocab_size)


def mask(constraint: grammar.Constraint, answer: list[int]) -> np.ndarray:
    """Return the mask after an answer by a matcher that has seen nothing else, int32 [words]."""
    fresh, masks = constraint.matcher(), np.zeros((1, constraint.words), np.int32)
    fresh.follow(answer)
    fresh.fill(masks)
    return masks[0]


def allowed(mask: np.ndarray) -> list[int]:
    """Return the tokens that a mask allows."""
    return [token for token in range(32 * len(mask)) if matcher.allows(mask, token)]
