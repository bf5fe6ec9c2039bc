"""Show on stderr that a model is loaded, a prompt is read, or a long task goes on."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn

from ..machine.progress import watcher
from .terminal import dumb

PATIENCE = 2.0  # seconds before a prompt of one chunk shows its progress
EVERY = 5.0  # seconds between two lines of one stage, where there is no terminal
NARROW = 40  # columns; a line broken in two would stay behind


def shows_progress(*, quiet: bool) -> bool:
    """Say if anybody would see it."""
    return sys.stderr.isatty() and not quiet and not dumb()


@contextlib.contextmanager
def loading(*, shown: bool) -> Iterator[None]:
    """Show a spinner, and beside it how far it is with what takes long: trying kernels, for the first time."""
    if not shown:
        yield
        return
    with Console(stderr=True).status("Loading the model") as status:
        token = watcher.set(lambda what, done, total: status.update(f"{what}, {done} of {total}"))
        try:
            yield
        finally:
            watcher.reset(token)


@contextlib.contextmanager
def bar(*columns: ProgressColumn, shown: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar of these columns; yields a function of what is done, how much of it, and of how much."""
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as progress:
        task = progress.add_task("", total=None)
        yield lambda what, done, total: progress.update(task, completed=done, total=total, description=what)


def stages(
    *columns: ProgressColumn, quiet: bool
) -> contextlib.AbstractContextManager[Callable[[str, int, int], None]]:
    """Show a `bar` on a terminal, elsewhere lines on stderr, and with `quiet` nothing."""
    if quiet or shows_progress(quiet=quiet):
        return bar(*columns, shown=not quiet)
    return contextlib.nullcontext(StageLines())


class StageLines:
    """Write on stderr that a stage begins, then every few seconds how far it is: "12 s: logits, 3 of 14"."""

    def __init__(self) -> None:
        self._began, self._stage, self._written = time.monotonic(), "", 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report a stage, how much of it is done, and of how much."""
        now = time.monotonic()
        if stage != self._stage or now - self._written >= EVERY:
            self._stage, self._written = stage, now
            click.echo(f"{now - self._began:.0f} s: {stage}, {done} of {total}", err=True)


class PromptProgress(contextlib.AbstractContextManager):
    """A bar on stderr while a prompt is read: at once where it takes several chunks, else after PATIENCE."""

    def __init__(self, *, shown: bool, chunk: int):
        console = Console(stderr=True)
        middle = [BarColumn(bar_width=12)] if console.width >= NARROW else []
        columns = TextColumn("{task.description}"), *middle, MofNCompleteColumn()
        self._bar = Progress(*columns, console=console, transient=True) if shown else None  # None at the end, too
        self._timer: threading.Timer | None = None
        self._chunk, self._lock = chunk, threading.Lock()
        if self._bar:
            self._bar.add_task("Reading", total=0)

    def __call__(self, done: int, total: int) -> None:
        """Report tokens read so far, and how many there are to read."""
        if done == total:
            return self._end()
        self._update(show=total > self._chunk, completed=done, total=total)
        if self._bar and not self._timer:
            self._timer = threading.Timer(PATIENCE, self._update, kwargs={"show": True})
            self._timer.daemon = True
            self._timer.start()

    def stopping(self) -> None:
        """Say that Ctrl-C was seen: the chunk under way is still read to its end."""
        self._update(show=True, description="(stopping)")

    def __exit__(self, *_: Any) -> None:
        self._end()

    def _update(self, *, show: bool, **changes: Any) -> None:
        with self._lock:
            if self._bar:
                self._bar.update(self._bar.task_ids[0], **changes)
                if show:
                    self._bar.start()

    def _end(self) -> None:
        """Remove the bar, for good."""
        with self._lock:
            if self._timer:
                self._timer.cancel()
            if self._bar:
                self._bar.stop()
                self._bar = None
