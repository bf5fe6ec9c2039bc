"""Compile grammars for a tokenizer, once each."""

import threading
from collections.abc import Collection
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ..machine.errors import first_line
from .forms import Grammar
from .gate import Gate, GatedMatcher
from .library import llguidance
from .matcher import Matcher
from .vocabulary import Vocabulary

_vocabularies: WeakKeyDictionary[Any, dict[tuple, Vocabulary]] = WeakKeyDictionary()
_lock = threading.Lock()
MOST_FORCED = 4096  # bytes that a style may force at the start; a recursive one forces them without end


class Constraint(NamedTuple):
    """A grammar compiled for a tokenizer.

    text:   the grammar's. eos: token ids that end an answer. words: number of int32 words of a mask, each for 32
            tokens. own_words: the same for the tokenizer's tokens alone.
    parser: llguidance's matcher at the start, which is copied. styles: the same of each usable style (`_style`).
    vocabulary: of the tokenizer. grammar: what was compiled, without its tokenizer.
    gate:   where in an answer the grammar applies; None: from its first token to its end.
    """

    text: str
    eos: tuple[int, ...]
    words: int
    own_words: int
    parser: Any
    styles: tuple[Any, ...]
    vocabulary: Vocabulary
    grammar: Grammar
    gate: Gate | None = None

    def matcher(self, start: int = 0, most: int = 0, stats: Any = None) -> Matcher:
        """Return the matcher of one answer, which begins after `start` tokens and has up to `most` drafts a cycle.

        A GatedMatcher if there is a gate. stats: as in `Matcher`. Raises GrammarError if the grammar does not accept
        the gate's `begun`.
        """
        how = self.parser.deep_copy(), self.styles, self.eos, (self.own_words, self.words), self.vocabulary
        found = GatedMatcher(*how, gate=self.gate) if self.gate else Matcher(*how)
        found.start, found.most, found.stats = start, most, stats
        return found

    def behind(self, gate: Gate) -> "Constraint":
        """Return a copy of this constraint for the part of an answer that a gate states; Gate() is the whole answer.

        Raises GrammarError if the grammar does not accept the gate's `begun`; also, where the answer can begin with
        the grammar, if that accepts no text or its first mask exceeds the limits of work or time.
        """
        found = self._replace(gate=None if gate == Gate() else gate)
        found.matcher().fill(np.empty((1, self.words), np.int32))
        for mark in () if gate.patterns else gate.after:
            self.vocabulary.beyond(mark.encode())  # reads all tokens, once per mark
        return found


def compiled(grammar: Grammar | Constraint, tokenizer: Any, vocab_size: int) -> Constraint:
    """Return a grammar compiled for a tokenizer and a model's number of logits; a Constraint is returned unchanged.

    The last used grammars of a tokenizer are cached (`Kept`).
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
    vocabulary = vocabulary_of(tokenizer, vocab_size)
    own, parser = vocabulary.own, vocabulary.parser(grammar.text, partial(_parser, vocabulary.own, grammar))
    styles = (vocabulary.parser(text, partial(_style, own, text)) for text in grammar.styles)
    words, own_words = ((size + 31) // 32 for size in (vocab_size, own.vocab_size))
    made = parser, tuple(style for style in styles if style), vocabulary, replace(grammar, tokenizer=None)
    return Constraint(grammar.text, tuple(own.eos_tokens), words, own_words, *made)


def is_compiled(grammar: Grammar, tokenizer: Any, vocab_size: int) -> bool:
    """Return whether `compiled` with these arguments finds the grammar and its styles cached.

    tokenizer: not None. Its `vocabulary_of` is made if it is not cached, which takes time and can raise.
    """
    parsers = vocabulary_of(tokenizer, vocab_size).parsers
    return all(text in parsers for text in (grammar.text, *grammar.styles))


def vocabulary_of(tokenizer: Any, vocab_size: int) -> Vocabulary:
    """Return the Vocabulary of a tokenizer: mlx-lm's, transformers', or an `LLTokenizer`, which is only wrapped.

    Of the others it is made once per `vocab_size` and end-of-text tokens, with Python's lock held; that takes 0.1 to
    6 seconds and 5 to 200 MB for 2k to 250k tokens. Raises ValueError as `compiled` does for a tokenizer.
    """
    LLTokenizer = llguidance().LLTokenizer
    if isinstance(tokenizer, LLTokenizer):
        if tokenizer.vocab_size > vocab_size:
            more = f"{tokenizer.vocab_size} tokens, more than the model's {vocab_size}"
            raise ValueError(f"tokenizer: {more}; use the model's own tokenizer")
        return _vocabulary(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"tokenizer: {type(tokenizer).__name__} has no backend_tokenizer; use a fast tokenizer")
    first = tokenizer.eos_token_id
    eos = getattr(tokenizer, "eos_token_ids", None)
    eos = eos if isinstance(eos, Collection) else [first]  # transformers has a number of this name
    key = vocab_size, *sorted(eos, key=lambda token: (token != first, token))
    inner = getattr(tokenizer, "_tokenizer", tokenizer)  # mlx-lm's wrappers are new objects for each answer
    with _lock:
        found = _vocabularies.setdefault(inner, {})
        if key not in found:
            try:
                found[key] = Vocabulary(LLTokenizer(backend.to_str(), n_vocab=vocab_size, eos_token=[*key[1:]]))
            except Exception as e:
                raise ValueError(f"tokenizer: llguidance cannot read it ({first_line(e)})") from e
        return found[key]


@lru_cache(4)
def _vocabulary(own: Any) -> Vocabulary:
    return Vocabulary(own)


def _parser(own: Any, grammar: Grammar, *, style: bool = False) -> Any:
    """Return a matcher at the start of a grammar, which has computed its first mask; it is copied, never advanced.

    The matcher is in error if it accepts no text, or if that mask exceeds the limits of work. own: llguidance's
    tokenizer. style: apply the lower limits of styles. Raises ValueError, with the grammar's name, if the grammar is
    invalid.
    """
    library = llguidance()
    limits = library.style_limits if style else library.limits
    parser = library.LLMatcher(own, grammar.text, limits=limits, log_level=0)
    if parser.is_error():
        raise ValueError(f"{grammar.name}: {parser.get_error().strip().partition(chr(10))[0]}")
    mask = np.empty((own.vocab_size + 31) // 32, np.int32)
    parser.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return parser


def _style(own: Any, text: str) -> Any:
    """Return a matcher as `_parser` does, with lower limits. own: llguidance's tokenizer. text: of the style.

    None if the text is invalid, the matcher is in error, or it forces more than MOST_FORCED bytes at the start.
    """
    try:
        parser = _parser(own, Grammar(text, "style"), style=True)
    except ValueError:
        return None
    fits = not parser.is_error() and len(parser.deep_copy().compute_ff_bytes()) <= MOST_FORCED
    return parser if fits else None
