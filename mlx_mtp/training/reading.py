"""Cut texts into documents, and record the target's hidden rows and its most likely tokens on them."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx

from ..cache.make_cache import make_prompt_cache
from .recording import OTHER, Recording
from .texts import LEAST, Text

ROWS = 256  # rows of logits at a time
HELD_OUT = 16  # about one text in this number measures the heads

Progress = Callable[[str, int, int], None]


def pieces(texts: Iterable[Text], length: int, vocab_size: int) -> Iterator[tuple[Text, bool]]:
    """Yield pairs (document, whether it is held out) of texts, each cut into documents of `length` tokens.

    A text's last document may have fewer tokens; documents of fewer than LEAST tokens are left out. `is_held_out` of
    the text's prompt decides for all its documents, so that all answers to a prompt are on one side. Of a text
    without a prompt, `is_held_out` of a document's first LEAST tokens decides for this document. ValueError for a
    token outside a vocabulary of this size, as with a tokenizer that does not fit the model.
    """
    for text in texts:
        for first in range(0, len(text.tokens), length):
            tokens = text.tokens[first : first + length]
            if len(tokens) >= LEAST:
                if outside := [t for t in tokens if not 0 <= t < vocab_size]:
                    has = f"the model has tokens 0 to {vocab_size - 1}; use its own tokenizer"
                    raise ValueError(f"token {outside[0]} in a text; {has}")
                answer = min(max(0, text.answer - first), len(tokens))
                yield Text(tokens, answer), is_held_out(text.tokens[: text.answer] or tokens[:LEAST])


def skip_recorded(documents: Iterator[tuple[Text, bool]], recording: Recording) -> None:
    """Drop as many documents as a recording has; ValueError if one of them has another prompt, or there are fewer.

    Of a document without a prompt all tokens are compared. Answers are not, since the model may have written them.
    """
    if not recording.documents:
        return
    recorded = recording.arrays()[1][:, 0]
    for document in recording.documents:
        text, _ = next(documents, (Text([]), False))
        tokens = recorded[document.first : document.end][: text.answer or None].tolist()
        if not text.tokens or tokens != text.tokens[: text.answer or None]:
            raise ValueError(f"{recording.path}: recorded with other texts; delete it, or {OTHER}")


def record(
    model: Any,
    documents: Iterator[tuple[Text, bool]],
    recording: Recording,
    limit: int,
    progress: Progress | None = None,
) -> None:
    """Read documents with the target, and append them to `recording` until it has `limit` tokens, or they end.

    Tokens recorded before count, and the last document is recorded whole. documents: those of `pieces`; each one that
    is taken is recorded, unless an exception ends the call. progress: called at the start, since a model takes long
    to write the first documents, and after each document with "recording", the number of recorded tokens, at most
    `limit`, and `limit`.
    """
    if progress:
        progress("recording", min(recording.size, limit), limit)
    while recording.size < limit and (document := next(documents, None)):
        text, held = document
        recording.append(text.tokens, *read(model, text.tokens), text.answer, held=held)
        if progress:
            progress("recording", min(recording.size, limit), limit)


def read(model: Any, tokens: list[int]) -> tuple[mx.array, mx.array]:
    """Return the target's hidden states [n, width] of n tokens, and its most likely token after each, int32 [n].

    Each token's context are the tokens before it.
    """
    cache = make_prompt_cache(model, num_draft_tokens=0)
    hidden = model.hidden(mx.array(tokens)[None], cache.layers)
    parts = (hidden[:, i : i + ROWS] for i in range(0, len(tokens), ROWS))
    choices = mx.concatenate([mx.argmax(model.logits(part)[0], axis=-1) for part in parts])
    return hidden[0], choices.astype(mx.int32)


def is_held_out(tokens: list[int]) -> bool:
    """Return whether a text is held out, by a hash of these tokens, which is the same on every machine.

    It is True for about one of HELD_OUT lists of tokens.
    """
    digest = hashlib.sha256(",".join(map(str, tokens)).encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT == 0
