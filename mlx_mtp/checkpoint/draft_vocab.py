"""Reduce the draft vocabulary: the MTP heads draft only listed tokens; the target chooses among all, as before.

The output does not change. A smaller LM head is faster and needs less memory, but tokens outside the list are never
drafted. Source: FR-Spec (arXiv 2502.14856), which ranks tokens by frequency.
"""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..layers.lm_head import KINDS, sliced
from ..machine.atomic import write_whole
from ..machine.errors import one_line
from ..machine.paths import expanded
from .file_sizes import DRAFT_VOCAB, check_size

FORMAT = 1
AGAIN = "make the file again with `mlx-mtp draft-vocab`"


@dataclass(frozen=True)
class DraftVocab:
    """Tokens that heads may draft, ascending. source: the list's name in messages.

    vocab_size, tokenizer: of the model that the list was made for, the tokenizer as its `digest`; None if unknown.
    """

    tokens: tuple[int, ...]
    source: str
    vocab_size: int | None = None
    tokenizer: str | None = None

    def check(self, vocab_size: int, tokenizer: Any = None) -> None:
        """Raise ValueError for a token outside a model's vocabulary, or a list made for another size or tokenizer.

        tokenizer: the model's; None is not compared.
        """
        if self.vocab_size not in (None, vocab_size):
            made = f"made for a vocabulary of {self.vocab_size} tokens; the model has {vocab_size}"
            raise ValueError(f"{self.source}: {made}; {AGAIN}")
        for token in (self.tokens[0], self.tokens[-1]):
            if not 0 <= token < vocab_size:
                raise ValueError(f"{self.source}: token {token} in the list; allowed are 0 to {vocab_size - 1}")
        if tokenizer is not None and self.tokenizer is not None and self.tokenizer != (current := digest(tokenizer)):
            made = f"made with another tokenizer, {self.tokenizer[:12]}; the model's is {current[:12]}"
            raise ValueError(f"{self.source}: {made}: make it with `mlx-mtp draft-vocab`")


def read(given: str | Path | Sequence[int]) -> DraftVocab:
    """Return the draft vocabulary in a file of `write` or a sequence of token ids; ValueError if it is invalid."""
    if not isinstance(given, str | Path):
        return DraftVocab(_tokens("draft_vocab", list(given)), "draft_vocab")
    file = expanded(given)
    if file.exists() and not file.is_file():  # reading a device may never end
        raise ValueError(f"{file}: not a file")
    check_size(file, DRAFT_VOCAB)
    try:
        with one_line(f"{file}: not a draft vocabulary, no valid JSON", (ValueError, RecursionError)):
            entries = json.loads(file.read_text(encoding="utf-8"))
    except OSError as e:
        raise ValueError(f"{file}: cannot be read ({e.strerror})") from None
    found = entries.get("format") if isinstance(entries, dict) else type(entries).__name__
    if found != FORMAT:
        wrote = "an object that `mlx-mtp draft-vocab` wrote"
        raise ValueError(f"{file}: format is {found!r}; allowed is {FORMAT}, {wrote}")
    size, tokenizer = entries.get("vocab_size"), entries.get("tokenizer")
    if type(size) is not int or size < 1:
        raise ValueError(f"{file}: vocab_size is {size!r}; expected an integer of at least 1; {AGAIN}")
    if not isinstance(tokenizer, str):
        raise ValueError(f"{file}: tokenizer is {tokenizer!r}; expected a digest in hexadecimal digits; {AGAIN}")
    vocab = DraftVocab(_tokens(str(file), entries.get("tokens")), str(file), size, tokenizer)
    vocab.check(size)
    return vocab


def _tokens(source: str, found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or not found:
        kind = "empty" if found == [] else type(found).__name__
        raise ValueError(f"{source}: the tokens are {kind}; allowed is a list of one or more")
    seen: set[int] = set()
    for i, token in enumerate(found):
        if type(token) is not int:
            raise ValueError(f"{source}: token {i} of the list is {token!r}; allowed are integers")
        if token in seen:
            raise ValueError(f"{source}: token {i} of the list is {token}, once more; list each token once")
        seen.add(token)
    return tuple(sorted(found))


def write(file: str | Path, tokens: Collection[int], vocab_size: int, tokenizer: Any) -> None:
    """Write tokens, the vocabulary's size and the tokenizer's `digest` to a JSON file for `load(draft_vocab=file)`.

    The file is replaced whole; a write that fails leaves an earlier file unchanged.
    """
    entries = {"format": FORMAT, "vocab_size": vocab_size, "tokenizer": digest(tokenizer), "tokens": sorted(tokens)}
    write_whole(file, json.dumps(entries) + "\n")


def digest(tokenizer: Any) -> str:
    """Return the SHA-256 of a tokenizer's tokens and ids in hexadecimal, which identifies it."""
    entries = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(entries.encode()).hexdigest()


def most_frequent(tokenizer: Any, counts: Mapping[int, int], size: int, vocab_size: int) -> list[int]:
    """Return `size` tokens, ascending: special ones, added ones in the chat template, then the most frequent.

    counts: the frequency of each token; of equally frequent ones those with smaller ids are chosen, because
    tokenizers number frequent tokens first. Raises ValueError if `size` is below 1 or the number of these fixed
    tokens, or the tokenizer has fewer than `size` tokens below vocab_size.
    """
    known = sorted(token for token in set(tokenizer.get_vocab().values()) if token < vocab_size)
    template = str(tokenizer.chat_template or "")
    written = {token for token, added in tokenizer.added_tokens_decoder.items() if str(added) in template}
    fixed = {*tokenizer.all_special_ids, *tokenizer.eos_token_ids, *written}.intersection(known)
    if not (least := max(1, len(fixed))) <= size <= len(known):
        allowed = f"{least}, for the special tokens alone, to {len(known)}, all that there are"
        raise ValueError(f"size={size}: allowed are {allowed}")
    ranked = sorted(known, key=lambda token: (token not in fixed, -counts.get(token, 0), token))
    return sorted(ranked[:size])


def reduce_heads(model: Any, tokens: Collection[int]) -> tuple[int, int]:
    """Restrict a port's heads to drafting `tokens`; return the rows of the first LM head now, of the last one before.

    Each head gets an LM head with the rows of these tokens, in the original order, so that ties are resolved as
    before; heads that shared an LM head share the new one. `head.token` maps rows to tokens. Call it before kernels
    are enabled, because they depend on the LM heads. Raises ValueError if none of the tokens is in a head's
    vocabulary (the others are ignored), or for an LM head of an unsupported kind.
    """
    listed, cut, before = set(tokens), {}, 0
    for depth, head in enumerate(model.mtp):
        full = model.unembedding(depth)
        if id(full) not in cut:
            before = full["weight"].shape[0]
            cut[id(full)] = full, _cut(head, full, listed)
        _, (head.head, head.d2t) = cut[id(full)]
    return model.mtp[0].d2t.size, before


def _cut(head: Any, full: Any, listed: set[int]) -> tuple[Any, mx.array]:
    """Return (an LM head with the listed rows only, int [rows]: the target's token minus the row's index).

    ValueError if no row is listed, or for an LM head of an unsupported kind.
    """
    if not isinstance(full, KINDS):
        allowed = ", ".join(kind.__name__ for kind in KINDS)
        raise ValueError(f"draft_vocab: an LM head of kind {type(full).__name__}; allowed are {allowed}")
    known: Any = head.token(mx.arange(full["weight"].shape[0])).tolist()
    kept = [(row, token) for row, token in enumerate(known) if token in listed]
    if not kept:
        raise ValueError(f"draft_vocab: the drafter has {len(known)} tokens, and none of the {len(listed)} listed")
    rows, tokens = map(mx.array, zip(*kept, strict=True))
    return sliced(full, rows), tokens - mx.arange(len(kept))
