"""Reduce the draft vocabulary: the heads choose among a list of tokens only, the target among all, as ever.

A text never changes by it; an LM head of few rows is read sooner and takes less memory, and drafts that are not in
the list are lost. Source: FR-Spec (arXiv 2502.14856), which ranks tokens by how often they occur.
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

FORMAT = 1


@dataclass(frozen=True)
class DraftVocab:
    """Tokens that heads may draft, ascending. `source`: what messages call them.

    vocab_size, tokenizer: what they were chosen for, where that is known; the latter as `digest` gives it.
    """

    tokens: tuple[int, ...]
    source: str
    vocab_size: int | None = None
    tokenizer: str | None = None

    def check(self, vocab_size: int, tokenizer: Any = None) -> None:
        """Raise ValueError where this is not for a model of so many tokens, or for another tokenizer."""
        if self.vocab_size not in (None, vocab_size):
            raise ValueError(f"{self.source}: made for {self.vocab_size} tokens; the model has {vocab_size}")
        _check_range(self.source, self.tokens, vocab_size)
        if tokenizer is not None and self.tokenizer is not None and self.tokenizer != (own := digest(tokenizer)):
            made = f"made with another tokenizer, {self.tokenizer[:12]}"
            raise ValueError(f"{self.source}: {made}; the model's is {own[:12]}")


def read(given: str | Path | Sequence[int]) -> DraftVocab:
    """Read the list that `write` wrote to a file, or that is given; ValueError names what is wrong with it."""
    if not isinstance(given, str | Path):
        return DraftVocab(_tokens("draft_vocab", list(given)), "draft_vocab")
    file = Path(given).expanduser()
    if file.exists() and not file.is_file():  # a device may never end
        raise ValueError(f"{file}: not a file")
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
        raise ValueError(f"{file}: vocab_size is {size!r}; allowed are integers from 1 on")
    if not isinstance(tokenizer, str):
        raise ValueError(f"{file}: tokenizer is {tokenizer!r}; allowed is a digest in hexadecimal digits")
    tokens = _tokens(str(file), entries.get("tokens"))
    _check_range(str(file), tokens, size)
    return DraftVocab(tokens, str(file), size, tokenizer)


def _tokens(source: str, found: Any) -> tuple[int, ...]:
    if not isinstance(found, list) or not found:
        kind = "empty" if found == [] else type(found).__name__
        raise ValueError(f"{source}: the tokens are {kind}; allowed is a list of one or more")
    seen: set[int] = set()
    for i, token in enumerate(found):
        if type(token) is not int:
            raise ValueError(f"{source}: token {i} of the list is {token!r}; allowed are integers")
        if token in seen:
            raise ValueError(f"{source}: token {i} of the list is {token}, once more; allowed is each once")
        seen.add(token)
    return tuple(sorted(found))


def _check_range(source: str, tokens: Sequence[int], vocab_size: int) -> None:
    for token in (tokens[0], tokens[-1]):
        if not 0 <= token < vocab_size:
            raise ValueError(f"{source}: token {token} in the list; allowed are 0 to {vocab_size - 1}")


def write(file: str | Path, tokens: Collection[int], vocab_size: int, tokenizer: Any) -> None:
    """Write the list for `load(..., draft_vocab=file)`: JSON, one object, all of it or nothing."""
    entries = {"format": FORMAT, "vocab_size": vocab_size, "tokenizer": digest(tokenizer), "tokens": sorted(tokens)}
    write_whole(file, json.dumps(entries) + "\n")


def digest(tokenizer: Any) -> str:
    """Tell tokenizers apart: SHA-256 of their tokens and ids, 64 hexadecimal digits."""
    entries = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(entries.encode()).hexdigest()


def most_frequent(tokenizer: Any, counts: Mapping[int, int], size: int, vocab_size: int) -> list[int]:
    """Choose `size` tokens to draft, ascending: special or the template's, the most frequent, the lowest ids.

    counts: how often each token occurs in texts. A tokenizer numbers its tokens in the order in which its training
    found them, the frequent ones first. Raises ValueError for a size that is less than the first of these take, or
    more than there are tokens below vocab_size.
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
    """Let the heads of a port draft from `tokens` alone; returns the LM heads' rows now, and before.

    Each head gets the rows of those tokens for an LM head of its own, in their order, so that of equal logits the
    same is chosen; heads that shared one share its rows. `head.token` knows which tokens they are. To be called
    before kernels are placed, which are made for the LM heads that there are. Raises ValueError where a drafter
    knows none of the tokens, or an LM head is of a kind that cannot be cut.
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
    """Return (the listed rows of an LM head, what to add to their numbers for the target's tokens)."""
    if not isinstance(full, KINDS):
        allowed = ", ".join(kind.__name__ for kind in KINDS)
        raise ValueError(f"draft_vocab: an LM head of kind {type(full).__name__}; allowed are {allowed}")
    known: Any = head.token(mx.arange(full["weight"].shape[0])).tolist()
    kept = [(row, token) for row, token in enumerate(known) if token in listed]
    if not kept:
        raise ValueError(f"draft_vocab: the drafter knows {len(known)} tokens, and none of the {len(listed)} listed")
    rows, tokens = map(mx.array, zip(*kept, strict=True))
    return sliced(full, rows), tokens - mx.arange(len(kept))
