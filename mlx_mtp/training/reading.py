"""Record a target's hidden rows and its own choices on texts, and let the target write answers to prompts."""

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx

from ..cache.prompt_cache import make_prompt_cache
from .recording import Recording
from .texts import Text

ROWS = 256  # rows of logits at a time
LEAST = 16  # tokens of a document; shorter ones are skipped
HELD_OUT = 20  # one text in so many measures the heads

Progress = Callable[[str, int, int], None]


def record(
    model: Any, texts: Iterable[Text], recording: Recording, limit: int, length: int, progress: Progress | None = None
) -> None:
    """Read texts with the target until `limit` tokens are recorded, or the texts end; skip those recorded before.

    length: maximum tokens of a document; longer texts are cut into several. A text, all of its documents, is held out
    by a hash of its first tokens, so that equal prompts are on one side. progress: called with the recorded tokens.
    """
    skipped = len(recording.documents)
    for text in texts:
        held = is_held_out(text.tokens[: max(LEAST, text.answer)])
        for first in range(0, len(text.tokens), length):
            tokens = text.tokens[first : first + length]
            if len(tokens) < LEAST:
                continue
            if skipped:
                skipped -= 1
                continue
            if recording.size + len(tokens) > limit:
                return
            hidden, choices = read(model, tokens)
            recording.append(tokens, hidden, choices, min(max(0, text.answer - first), len(tokens)), held=held)
            if progress:
                progress("recording", recording.size, limit)


def read(model: Any, tokens: list[int]) -> tuple[mx.array, mx.array]:
    """Return the target's hidden rows [n, width] of n tokens, and its most likely next token after each, int32 [n]."""
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
