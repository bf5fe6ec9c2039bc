"""Report the progress of a long task to a callback, without passing it through every call."""

from collections.abc import Callable
from contextvars import ContextVar

# Receives the task, the units done and their total; None if nothing displays progress.
watcher: ContextVar[Callable[[str, int, int], None] | None] = ContextVar("watcher", default=None)


def report_progress(what: str, done: int, total: int) -> None:
    """Call `watcher`, if one is set, with a task's name, its finished units and their total."""
    if show := watcher.get():
        show(what, done, total)
