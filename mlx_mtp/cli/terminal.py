"""Keyboard, interrupts and progress of `mlx-mtp chat`; plain lines where there is no terminal."""

import contextlib
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from typing import Any

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ..session import ChatSession

PATIENCE = 2.0  # seconds before a prompt of one chunk shows its progress
# Control characters but tab and newline: a model may not move the cursor or change the terminal.
CONTROLS = {**dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160)], "\ufffd"), 13: None}


def printable(text: str) -> str:
    """The text with control characters made visible."""
    return text.translate(CONTROLS)


class Lines:
    """What the user sends: from an editor with history, pasted pages and Alt-Enter for a new line, or from a pipe.

    Called for the next message; None means to leave: at the end of input or at two Ctrl-C in a row on an empty
    line, of which the first only calls `warn`.
    """

    def __init__(self, *, editing: bool, warn: Callable[[str], None]):
        self._warn, self._warned = warn, False
        self._editor: PromptSession[str] | None = None
        if editing:
            keys = KeyBindings()
            keys.add("escape", "enter")(_new_line)
            keys.add("c-c")(self._clear)
            keys.add("<sigint>")(self._clear)
            self._editor = PromptSession(key_bindings=keys)
        else:
            sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]

    def __call__(self) -> str | None:
        self._warned = False
        while True:
            try:
                return self._next()
            except EOFError:
                return None
            except KeyboardInterrupt:
                if self._warned:
                    return None
                self._warned = True
                self._warn("/exit, Ctrl-D or another Ctrl-C leaves the chat.")

    def _next(self) -> str | None:
        if self._editor is None:
            return sys.stdin.readline() or None
        text = self._editor.prompt(HTML("<b>&gt;</b> "), prompt_continuation="  ")
        return text.encode("utf-8", "replace").decode()  # bytes that were no UTF-8 arrive as lone surrogates

    def _clear(self, event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            self._warned = False
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)


def _new_line(event: KeyPressEvent) -> None:
    event.current_buffer.insert_text("\n")


@contextlib.contextmanager
def hidden_typing(*, active: bool) -> Iterator[None]:
    """Keys pressed meanwhile wait for the next prompt instead of showing up in the middle of an answer."""
    if not active:
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


class StopOnInterrupt:
    """While entered, the first Ctrl-C lets the session stop where its caches are whole; a second raises."""

    def __init__(self, session: ChatSession):
        self._session = session

    def __enter__(self) -> None:
        self._session.stopping = False
        self._previous = signal.signal(signal.SIGINT, self._interrupt)

    def __exit__(self, *_: Any) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _interrupt(self, *_: Any) -> None:
        if self._session.stopping:
            raise KeyboardInterrupt
        self._session.stopping = True


def loading(*, shown: bool) -> contextlib.AbstractContextManager:
    """A spinner on stderr."""
    return Console(stderr=True).status("Loading the model") if shown else contextlib.nullcontext()


class PromptProgress:
    """A bar on stderr while a prompt is read: at once where it takes several chunks, else after PATIENCE."""

    def __init__(self, *, shown: bool, chunk: int):
        self._shown, self._chunk = shown, chunk
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        self._timer: threading.Timer | None = None
        self._count = (0, 0)

    def __enter__(self) -> "PromptProgress":
        return self

    def __exit__(self, *_: Any) -> None:
        self._end()

    def __call__(self, done: int, total: int) -> None:
        """Report tokens read so far, and how many there are to read."""
        self._count = (done, total)
        if done == total:
            self._end()
        elif not self._shown:
            return
        elif self._bar:
            self._bar.update(self._bar.task_ids[0], completed=done)
        elif total > self._chunk:
            self._start()
        elif not self._timer:
            self._timer = threading.Timer(PATIENCE, self._start)
            self._timer.daemon = True
            self._timer.start()

    def _start(self) -> None:
        with self._lock:
            done, total = self._count
            if self._bar or not self._shown:
                return
            # Short, so that a terminal made narrower does not break it into lines that stay behind.
            columns = TextColumn("Reading"), BarColumn(bar_width=12), MofNCompleteColumn()
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.add_task("", completed=done, total=total)
            self._bar.start()

    def _end(self) -> None:
        """Remove the bar, for good."""
        with self._lock:
            self._shown = False
            if self._timer:
                self._timer.cancel()
            if self._bar:
                self._bar.stop()
                self._bar = None
