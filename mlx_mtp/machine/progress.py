"""Let a long task say how far it is to whoever shows that, without a parameter in every call between the two."""

from collections.abc import Callable
from contextvars import ContextVar

# Told what is being done, how much of it is, and of how much; None where nobody looks.
watcher: ContextVar[Callable[[str, int, int], None] | None] = ContextVar("watcher", default=None)


def tell(what: str, done: int, total: int) -> None:
    """Say that so much of something is done."""
    if show := watcher.get():
        show(what, done, total)
