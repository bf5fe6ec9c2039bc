"""Record a target's hidden rows and its own choices on texts, and let the target write answers to prompts."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx

from ..cache.prompt_cache import make_prompt_cache
from .recording import Recording
from .texts import Text

ROWS = 256  # rows of logits at a time
LEAST = 16  # tokens of a document; shorter ones are skipped
HELD_OUT = 16  # one text of this number measures the heads

Progress = Callable[[str, int, int], None]


def pieces(texts: Iterable[Text], length: int, vocab_size: int) -> Iterator[tuple[Text, bool]]:
    """Yield the documents of texts, of LEAST to `length` tokens each, and whether each is held out, by a hash.

    The hash is of a text's prompt, so that all answers to a prompt are on one side; without a prompt, of the first
    tokens of each document. ValueError for a token that a vocabulary of this size does not have, as with a tokenizer
    that does not fit the model.
    """
    for text in texts:
        for first in range(0, len(text.tokens), length):
            tokens = text.tokens[first : first + length]
            if len(tokens) >= LEAST:
                if outside := [t for t in tokens if not 0 <= t < vocab_size]:
                    raise ValueError(f"token {outside[0]} in a text; the model has tokens 0 to {vocab_size - 1}")
                answer = min(max(0, text.answer - first), len(tokens))
                yield Text(tokens, answer), is_held_out(text.tokens[: text.answer] or tokens[:LEAST])


def record(
    model: Any,
    documents: Iterator[tuple[Text, bool]],
    recording: Recording,
    limit: int,
    progress: Progress | None = None,
) -> None:
    """Read documents with the target until at least `limit` tokens are recorded, or the documents end.

    progress: called with the recorded tokens.
    """
    while recording.size < limit:
        text, held = next(documents, (None, False))
        if text is None:
            return
        hidden, choices = read(model, text.tokens)
        recording.append(text.tokens, hidden, choices, text.answer, held=held)
        if progress:
            progress("recording", min(recording.size, limit), limit)


def read(model: Any, tokens: list[int]) -> tuple[mx.array, mx.array]:
    """Return the target's hidden rows [n, width] of n tokens, and its most likely token after each, int32 [n]."""
    cache = make_prompt_cache(model, num_draft_tokens=0)
    hidden = model.hidden(mx.array(tokens)[None], cache.layers)
    parts = (hidden[:, i : i + ROWS] for i in range(0, len(tokens), ROWS))
    choices = mx.concatenate([mx.argmax(model.logits(part)[0], axis=-1) for part in parts])
    mx.eval(hidden, choices)
    return hidden[0], choices.astype(mx.int32)


def is_held_out(tokens: list[int]) -> bool:
    """Return whether a text that begins with these tokens is held out: by a hash, the same on every machine."""
    digest = hashlib.sha256(",".join(map(str, tokens)).encode()).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT == 0
