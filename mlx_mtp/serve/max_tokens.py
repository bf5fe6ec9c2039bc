"""Reduce a request's maximum number of tokens to what fits in memory."""

from typing import Any

from ..cache.prompt_cache import PromptCache
from ..decoding.memory_needs import check_prompt
from ..machine.errors import first_line
from ..machine.memory import SKIP


def agreed_max_tokens(served: Any, cache: PromptCache, request: Any) -> int:
    """Return the request's max_tokens, halved until prompt and answer fit in memory; ValueError if not even 1 fits.

    On several ranks rank 0 decides: the others return its result, and all raise its error as ValueError. served: a
    `Served`. cache: with the first tokens of the prompt, or none. request: a `DecodeRequest`.
    """
    if not served.ranks:
        return _fitting_max_tokens(served, cache, request)
    try:
        found: Any = None if served.ranks.rank else _fitting_max_tokens(served, cache, request)
    except Exception as e:  # the other ranks wait for a message
        found = first_line(e)
    found = served.ranks.broadcast(found)
    if isinstance(found, str):
        raise ValueError(found)
    return found


def _fitting_max_tokens(served: Any, cache: PromptCache, request: Any) -> int:
    """Return the request's max_tokens, halved until it fits in memory; raises ValueError if not even 1 fits."""
    rest, max_tokens = len(request.prompt) - cache.offset, request.max_tokens
    while True:
        try:
            check_prompt(served.model, cache, rest, max_tokens, served.tree.chunking.step, ignore=False)
            return max_tokens
        except ValueError as e:
            if max_tokens == 1:
                raise ValueError(str(e).removesuffix(SKIP)) from None  # a client cannot set a variable of the server
        max_tokens //= 2
