"""Show progress on stderr: of a load, a prefill or another long task."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..machine.progress import watcher
from .terminal import dumb

PATIENCE = 2.0  # seconds before the prefill of a single chunk shows progress
EVERY = 5.0  # seconds between two lines of one stage if stderr is not a terminal
NARROW = 40  # columns; a wrapped line would not be erased


def shows_progress(*, quiet: bool) -> bool:
    """Return whether to display progress: not with `quiet`, and only if stderr is a terminal with escape codes."""
    return sys.stderr.isatty() and not quiet and not dumb()


@contextlib.contextmanager
def loading(*, shown: bool) -> Iterator[None]:
    """If `shown`, show a spinner on stderr, with the progress of reading and of kernel trials.

    A `watcher` that was set before also receives the progress.
    """
    if not shown:
        yield
        return
    with Console(stderr=True).status("Loading the model") as status:
        token = watcher.set(partial(_show, status, watcher.get()))
        try:
            yield
        finally:
            watcher.reset(token)


def _show(status: Any, before: Callable[[str, int, int], None] | None, what: str, done: int, total: int) -> None:
    """Show progress in a spinner's line, and pass it to the watcher that was set before, if there was one."""
    status.update(f"{what}, {done} of {total}")
    if before:
        before(what, done, total)


@contextlib.contextmanager
def watched(*, shown: bool) -> Iterator[None]:
    """If `shown`, show a spinner on stderr from the first `report_progress` in the block until the block's end.

    A `watcher` that was set before receives no progress in the block.
    """
    status = Console(stderr=True).status("")

    def show(what: str, done: int, total: int) -> None:
        status.update(f"{what}, {done} of {total}")
        status.start()

    token = watcher.set(show if shown else None)
    try:
        yield
    finally:
        watcher.reset(token)
        status.stop()


@contextlib.contextmanager
def bar(*, shown: bool, of_bytes: bool = False, left: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar on stderr if `shown`; yield a function that takes a description, the number done and the total.

    of_bytes: the numbers are bytes. left: also show the remaining time.
    """
    columns = [TextColumn("{task.description}"), BarColumn(bar_width=20)]
    columns += [DownloadColumn() if of_bytes else MofNCompleteColumn(), *([TimeRemainingColumn()] if left else [])]
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not shown) as progress:
        task = progress.add_task("", total=None)
        yield lambda what, done, total: progress.update(task, completed=done, total=total, description=what)


def stages(*, quiet: bool, left: bool = False) -> contextlib.AbstractContextManager[Callable[[str, int, int], None]]:
    """Return a context like `bar`, which prints lines instead where no bar can be shown; nothing with `quiet`."""
    if quiet or shows_progress(quiet=quiet):
        return bar(shown=not quiet, left=left)
    return contextlib.nullcontext(StageLines())


class StageLines:
    """Prints a stage's start on stderr, then its progress every EVERY seconds, as in "12 s: logits, 3 of 14"."""

    def __init__(self) -> None:
        self._began, self._stage, self._written = time.monotonic(), "", 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report a stage, the number done and the total."""
        now = time.monotonic()
        if stage != self._stage or now - self._written >= EVERY:
            self._stage, self._written = stage, now
            click.echo(f"{now - self._began:.0f} s: {stage}, {done} of {total}", err=True)


class PromptProgress(contextlib.AbstractContextManager):
    """If `shown`, a bar on stderr during a prefill: at once if it has several chunks, else after PATIENCE seconds."""

    def __init__(self, *, shown: bool, chunk: int):
        console = Console(stderr=True)
        middle = [BarColumn(bar_width=12)] if console.width >= NARROW else []
        columns = TextColumn("{task.description}"), *middle, MofNCompleteColumn()
        self._bar = Progress(*columns, console=console, transient=True) if shown else None  # also None after its end
        self._timer: threading.Timer | None = None
        self._chunk, self._lock = chunk, threading.Lock()
        if self._bar:
            self._bar.add_task("Reading", total=None)

    def __call__(self, done: int, total: int) -> None:
        """Report the number of prefilled tokens and the total; the bar ends when they are equal."""
        if done == total:
            return self.end()
        self._update(show=total > self._chunk, completed=done, total=total)
        self.begin()

    def begin(self) -> None:
        """Show the bar after PATIENCE seconds, also if nothing is reported until then, unless `end` is called."""
        if self._bar and not self._timer:
            self._timer = threading.Timer(PATIENCE, self._update, kwargs={"show": True})
            self._timer.daemon = True
            self._timer.start()

    def stopping(self) -> None:
        """Show that Ctrl-C was received; the current chunk is still finished."""
        self._update(show=True, description="(stopping)")

    def __exit__(self, *_: Any) -> None:
        self.end()

    def _update(self, *, show: bool, **changes: Any) -> None:
        with self._lock:
            if self._bar:
                self._bar.update(self._bar.task_ids[0], **changes)
                if show:
                    self._bar.start()

    def end(self) -> None:
        """Remove the bar for good."""
        with self._lock:
            if self._timer:
                self._timer.cancel()
            if self._bar:
                self._bar.stop()
                self._bar = None
