"""Compile grammars for a tokenizer, once each."""

import threading
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..machine.errors import first_line
from .forms import Grammar
from .gate import Gate, GatedMatcher, beyond
from .library import llguidance
from .matcher import Matcher

KEPT = 64  # compiled grammars, the last used ones; each has up to 0.3 MB

_tokenizers: WeakKeyDictionary[Any, dict[tuple, Any]] = WeakKeyDictionary()
_lock = threading.Lock()


class Constraint(NamedTuple):
    """A grammar compiled for a tokenizer.

    text:   the grammar's. eos: token ids that end an answer. words: of a mask, 32 tokens each; own_words: of those
            that the tokenizer has.
    parser: a matcher at the start, which is copied. styles: the same of each of the grammar's styles.
    tokenizer: llguidance's. grammar: what was compiled. gate: where in an answer it applies; None: from its first
            token to its end.
    """

    text: str
    eos: tuple[int, ...]
    words: int
    own_words: int
    parser: Any
    styles: tuple[Any, ...]
    tokenizer: Any
    grammar: Grammar
    gate: Gate | None = None

    def matcher(self, start: int = 0, most: int = 0) -> Matcher:
        """Return the matcher of one answer, which begins after `start` tokens and has up to `most` drafts a cycle."""
        how = self.parser.deep_copy(), self.styles, self.eos, (self.own_words, self.words)
        found = GatedMatcher(*how, gate=self.gate, tokenizer=self.tokenizer) if self.gate else Matcher(*how)
        found.start, found.most = start, most
        return found

    def behind(self, gate: Gate) -> "Constraint":
        """Return this grammar for the part of an answer that a gate states.

        Raises GrammarError if the grammar does not accept the gate's `begun`.
        """
        found = self._replace(gate=None if gate == Gate() else gate)
        found.matcher()
        for mark in () if gate.patterns else gate.after:
            beyond(self.tokenizer, mark.encode())  # reads the vocabulary, once per mark
        return found


def compiled(grammar: Grammar | Constraint, tokenizer: Any, vocab_size: int) -> Constraint:
    """Return a grammar compiled for a tokenizer and a model's number of logits; cached. A Constraint is returned.

    tokenizer: mlx-lm's or transformers', with `backend_tokenizer`, or an `LLTokenizer`; None: the grammar's own.
    Raises ValueError without any tokenizer, and for a grammar that the tokenizer does not suit.
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
    kept = replace(grammar, tokenizer=None)
    return Constraint(grammar.text, tuple(own.eos_tokens), words, own_words, parser, styles, own, kept)


def _of_library(tokenizer: Any, vocab_size: int) -> Any:
    """Return llguidance's tokenizer for one of mlx-lm or transformers; made once."""
    LLTokenizer = llguidance().LLTokenizer
    if isinstance(tokenizer, LLTokenizer):
        if tokenizer.vocab_size > vocab_size:
            raise ValueError(f"tokenizer: {tokenizer.vocab_size} tokens; the model has {vocab_size}")
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
