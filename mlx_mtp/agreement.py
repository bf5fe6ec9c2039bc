"""The load-time self-test: does the first head guess what the target says? A head that is wired or converted wrongly
never changes the text, it is only never right; this makes that visible before anyone times it.
"""

from typing import Any

import mlx.core as mx

from .prompt_cache import make_prompt_cache

WORDS = """The library opens at nine in the morning and closes at six. If you want to borrow a book, bring your
card to the desk, and we will tell you when it is due. Here is how the same rule looks in Python:

def is_open(hour):
    return 9 <= hour < 18

for hour in range(24):
    print(hour, "open" if is_open(hour) else "closed")
"""
RANDOM_TOKENS = 64
LEAST = 0.02  # trained heads agree on far more, even on random tokens; untrained ones on 1 of vocab_size


def agreement(model: Any, tokens: list[int]) -> float:
    """The share of positions of a text at which the first head's greedy draft is the target's greedy token."""
    cache = make_prompt_cache(model)
    hidden = model.hidden(mx.array(tokens)[None], cache.layers)
    says = mx.argmax(model.logits(hidden[:, 1:])[0], axis=-1)
    head, rows = model.mtp[0], model.capture(hidden[:, :-1])
    output = head(model.embed(mx.array(tokens)[None, 1:], 0), rows, cache.heads[0])
    logits = model.draft_logits(0, output)[0]
    right = head.token(mx.argmax(logits, axis=-1)) == says
    share: Any = (right & ~mx.isnan(logits).any(axis=-1)).mean().item()
    return share


def random_tokens(vocab_size: int) -> list[int]:
    """RANDOM_TOKENS token ids, always the same."""
    return mx.random.randint(0, vocab_size, (RANDOM_TOKENS,), key=mx.random.key(0)).tolist()  # type: ignore[return-value]
