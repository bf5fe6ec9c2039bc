"""Test at load time how often the first MTP head drafts the target's token.

A head that is wired or converted wrongly does not change the output, but its drafts are all rejected.
"""

import warnings
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import get_total_parameters

from ..cache.make_cache import make_prompt_cache
from ..decoding.memory_needs import needs
from ..decoding.prefill import evaluated, without_refused
from ..layers.target import Target
from ..machine.errors import one_line
from ..tuning.kernel_fallback import run_first

WORDS = """The library opens at nine in the morning and closes at six. If you want to borrow a book, bring your
card to the desk. Here is the same rule in Python:

def is_open(hour):
    return 9 <= hour < 18
"""
RANDOM_TOKENS = 64
FEW_TOKENS = 32  # of one text, if the test delays a response
ROWS = 16  # logits in memory at a time
MIN_AGREEMENT = 0.02  # trained heads reach far more, even on random tokens; untrained ones 1 / vocab_size
SUSPECT = {"random tokens": 0.05, "words": 0.1}  # damaged heads still draft frequent tokens
SMALL = 1000  # in a smaller vocabulary chance alone reaches SUSPECT
AT_LOAD = 1 << 24  # weights of a model; with more, and in any type, the passes of the test take seconds on a CPU


def is_large(model: Target) -> bool:
    """Return whether a model's heads should be read and tested after the load: on a CPU, above AT_LOAD weights."""
    return mx.default_device() == mx.cpu and get_total_parameters(model) > AT_LOAD


def self_test(model: Target, path: Path, texts: dict[str, list[int]]) -> None:
    """Add the first head's agreement with the target to the report, and warn if it is low; without heads do nothing.

    texts: token ids by the kind of text, one of SUSPECT; those of at most two tokens are left out. The last kind left
    decides; in a vocabulary below SMALL, the highest agreement does. ValueError if the model cannot run.
    """
    if not model.mtp:
        return
    with naming_config(path):
        usable = {kind: tokens for kind, tokens in texts.items() if len(tokens) > 2}
        shares = {kind: without_refused(model, agreement, model, tokens) for kind, tokens in usable.items()}
    model.runtime.note(agreement=tuple(shares.items()))
    kind, share = list(shares.items())[-1]
    if share < SUSPECT[kind] if model.vocab_size >= SMALL else max(shares.values()) < MIN_AGREEMENT:
        kinds = ", ".join(f"{share:.1%} of {kind}" for kind, share in shares.items())
        adapted = f" with adapter {name}" if (name := model.runtime.adapters.selected) else ""
        text = f"{path}: the first head agrees with the target{adapted} on {kinds}; expect no speed-up"
        warnings.warn(text, stacklevel=4)


def naming_config(path: Path) -> AbstractContextManager[None]:
    """Return a context that converts a forward pass's errors, such as TypeError, to a ValueError with config.json."""
    message = f"{path}/config.json: the model that it describes cannot run"
    return one_line(message, (TypeError, AttributeError, LookupError, ArithmeticError))


def check_runs(model: Target, path: Path) -> None:
    """Raise ValueError if types in config.json break a forward pass, of which the graph is built but not computed.

    Sizes that do not fit each other are not reported here: a load reports them.
    """
    with naming_config(path), suppress(ValueError):
        needs(model, 1)


def agreement(model: Target, tokens: list[int]) -> float:
    """Return the share of positions at which the first head's greedy draft equals the target's greedy token.

    tokens: two or more. Positions with NaN in the draft's logits do not agree.
    """
    cache = make_prompt_cache(model)
    hidden = model.hidden(mx.array(tokens)[None], cache.layers)
    head, rows = model.mtp[0], model.capture(hidden[:, :-1])
    output = head(model.embed(mx.array(tokens)[None, 1:], 0), rows, cache.heads[0])
    accepted: Any = 0
    for i in range(0, len(tokens) - 1, ROWS):
        targets = mx.argmax(model.logits(hidden[:, i + 1 : i + 1 + ROWS])[0], axis=-1)
        logits = model.draft_logits(0, output[:, i : i + ROWS])[0]
        same = head.token(mx.argmax(logits, axis=-1)) == targets
        count = (same & ~mx.isnan(logits).any(axis=-1)).sum()
        run_first(model)
        accepted += evaluated(count.item)
    return accepted / (len(tokens) - 1)


def random_tokens(vocab_size: int) -> list[int]:
    """Return RANDOM_TOKENS random token ids from a fixed seed."""
    return mx.random.randint(0, vocab_size, (RANDOM_TOKENS,), key=mx.random.key(0)).tolist()  # type: ignore[return-value]
