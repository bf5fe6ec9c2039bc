"""Compile grammars for a tokenizer, once each."""

import threading
from collections.abc import Collection
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..machine.errors import first_line
from .forms import Grammar
from .library import llguidance
from .matcher import Matcher

KEPT = 64  # compiled grammars, the last used ones; each has up to 0.3 MB

_tokenizers: WeakKeyDictionary[Any, dict[tuple, Any]] = WeakKeyDictionary()
_lock = threading.Lock()


class Constraint(NamedTuple):
    """A grammar compiled for a tokenizer.

    text:   the grammar's. eos: token ids that end an answer. words: number of int32 words of a mask, each for 32
            tokens. own_words: the same for the tokenizer's tokens alone.
    parser: a matcher at the start, which is copied. styles: the same of each of the grammar's styles.
    """

    text: str
    eos: tuple[int, ...]
    words: int
    own_words: int
    parser: Any
    styles: tuple[Any, ...]

    def matcher(self, start: int = 0, most: int = 0) -> Matcher:
        """Return the matcher of one answer, which begins after `start` tokens and has up to `most` drafts a cycle."""
        found = Matcher(self.parser.deep_copy(), self.styles, self.eos, (self.own_words, self.words))
        found.start, found.most = start, most
        return found


def compiled(grammar: Grammar | Constraint, tokenizer: Any, vocab_size: int) -> Constraint:
    """Return a grammar compiled for a tokenizer and a model's number of logits; cached. A Constraint is unchanged.

    tokenizer: mlx-lm's or transformers', with `backend_tokenizer`, or an `LLTokenizer`; None: the grammar's own.
    Raises ValueError without llguidance or any tokenizer, for a tokenizer that llguidance cannot read or that has
    more tokens than logits, and for another type of grammar, or one that llguidance refuses with this tokenizer.
    """
    if isinstance(grammar, Constraint):
        return grammar
    if not isinstance(grammar, Grammar):
        raise ValueError(f"grammar: a {type(grammar).__name__}; expected one from mlx_mtp.grammar")
    tokenizer = grammar.tokenizer if tokenizer is None else tokenizer
    if tokenizer is None:
        raise ValueError(f"{grammar.name}: no tokenizer; make the grammar with tokenizer=")
    own = _of_library(tokenizer, vocab_size)
    parser = _parser(own, grammar.text, grammar.name)
    styles = tuple(_parser(own, text, grammar.name) for text in grammar.styles)
    words, own_words = ((size + 31) // 32 for size in (vocab_size, own.vocab_size))
    return Constraint(grammar.text, tuple(own.eos_tokens), words, own_words, parser, styles)


def _of_library(tokenizer: Any, vocab_size: int) -> Any:
    """Return llguidance's tokenizer for one of mlx-lm or transformers, made once; its own is returned as it is."""
    LLTokenizer = llguidance().LLTokenizer
    if isinstance(tokenizer, LLTokenizer):
        if tokenizer.vocab_size > vocab_size:
            raise ValueError(
                f"tokenizer: {tokenizer.vocab_size} tokens, more than the model's {vocab_size}; use its own"
            )
        return tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"tokenizer: {type(tokenizer).__name__} has no backend_tokenizer; grammars need a fast one")
    first = tokenizer.eos_token_id
    eos = getattr(tokenizer, "eos_token_ids", None)
    eos = eos if isinstance(eos, Collection) else [first]  # transformers has a number of this name
    key = vocab_size, *sorted(eos, key=lambda token: (token != first, token))
    inner = getattr(tokenizer, "_tokenizer", tokenizer)  # mlx-lm's wrappers are new objects for each answer
    with _lock:
        found = _tokenizers.setdefault(inner, {})
        if key not in found:
            try:
                found[key] = LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=[*key[1:]])
            except Exception as e:
                raise ValueError(f"tokenizer: llguidance cannot read it ({first_line(e)})") from e
        return found[key]


@lru_cache(KEPT)
def _parser(tokenizer: Any, text: str, name: str) -> Any:
    """Return a matcher at the start of a grammar; it is copied and never advanced."""
    library = llguidance()
    parser = library.LLMatcher(tokenizer, text, limits=library.limits, log_level=0)
    if parser.is_error():
        raise ValueError(f"{name}: {parser.get_error().strip().partition(chr(10))[0]}")
    return parser
