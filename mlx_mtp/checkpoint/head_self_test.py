"""The load-time self-test: does the first head guess what the target says? A head that is wired or converted wrongly
never changes the text, it is only never right; this makes that visible before anyone times it.
"""

from typing import Any

import mlx.core as mx

from ..cache.prompt_cache import make_prompt_cache

WORDS = """The library opens at nine in the morning and closes at six. If you want to borrow a book, bring your
card to the desk. Here is the same rule in Python:

def is_open(hour):
    return 9 <= hour < 18
"""
RANDOM_TOKENS = 64
ROWS = 16  # whose logits are held at a time
LEAST = 0.02  # trained heads agree on far more, even on random tokens; untrained ones on 1 of vocab_size


def agreement(model: Any, tokens: list[int]) -> float:
    """The share of positions of a text at which the first head's greedy draft is the target's greedy token."""
    cache = make_prompt_cache(model)
    hidden = model.hidden(mx.array(tokens)[None], cache.layers)
    head, rows = model.mtp[0], model.capture(hidden[:, :-1])
    output = head(model.embed(mx.array(tokens)[None, 1:], 0), rows, cache.heads[0])
    right: Any = 0
    for i in range(0, len(tokens) - 1, ROWS):
        says = mx.argmax(model.logits(hidden[:, i + 1 : i + 1 + ROWS])[0], axis=-1)
        logits = model.draft_logits(0, output[:, i : i + ROWS])[0]
        same = head.token(mx.argmax(logits, axis=-1)) == says
        right += (same & ~mx.isnan(logits).any(axis=-1)).sum().item()
    return right / (len(tokens) - 1)


def random_tokens(vocab_size: int) -> list[int]:
    """RANDOM_TOKENS token ids, always the same."""
    return mx.random.randint(0, vocab_size, (RANDOM_TOKENS,), key=mx.random.key(0)).tolist()  # type: ignore[return-value]
