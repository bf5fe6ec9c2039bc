"""Print to a terminal; handle keyboard input and interrupts of `mlx-mtp chat`; read lines without a terminal."""

import contextlib
import os
import shutil
import signal
import socket
import sys
import termios
import textwrap
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..session import ChatSession
    from .line_editor import Values

# Control characters except tab and newline: a model's output must not move the cursor or change the terminal.
CONTROLS = {**dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160)], "\ufffd"), 13: None}


def printable(text: str) -> str:
    """Return a text with a visible character for each control character except tab and newline, without \\r."""
    return text.translate(CONTROLS)


def print_above(text: str) -> None:
    """Print a line on stderr, above a bar or a spinner that is shown."""
    click.echo(text, file=sys.stderr)  # not err=True: click would write to the stream that the bar has replaced


def terminal_size() -> os.terminal_size:
    """Return the terminal's columns and lines, at least 1 each."""
    size = shutil.get_terminal_size()
    return os.terminal_size((max(1, size.columns), max(1, size.lines)))


def wrapped(text: str, *, indent: int = 0) -> str:
    """Return a text whose lines are wrapped at words to the terminal's width, or unchanged if output is no terminal.

    indent: spaces before the continuation of a line.
    """
    if not sys.stdout.isatty():
        return text
    width = max(terminal_size().columns, 2 * indent + 1)
    return "\n".join(textwrap.fill(line, width, subsequent_indent=" " * indent) for line in text.split("\n"))


def is_interactive() -> bool:
    """Return whether input and output are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def dumb() -> bool:
    """Return whether the terminal supports no escape codes."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def unstyled() -> bool:
    """Return whether dim and bold are disabled by the user (https://no-color.org) or unsupported."""
    return dumb() or bool(os.environ.get("NO_COLOR"))


def faint(text: str, *, err: bool = False) -> None:
    """Print a line, dimmed unless the terminal or the user does not allow that. err: on stderr."""
    click.echo(text if unstyled() else click.style(text, dim=True), err=err)


class MessageReader:
    """Reads the user's messages from an editor (history, pasted text, Alt-Enter for a new line) or from a pipe.

    A call returns the next message, with its line end unless an editor read it, or None to leave: at the end of
    input, or after two Ctrl-C on an empty line without typing in between. The first Ctrl-C only warns; if not
    `patient` it leaves. values: the completions of each command, as `line_editor.CommandCompleter` takes them.
    """

    def __init__(self, *, interactive: bool, values: "Values", patient: bool = True):
        self._warned, self._patient = False, patient
        self._editor: Any = None
        self._prompt = "> " if interactive else ""
        if interactive and not dumb():
            from .line_editor import make_editor

            typed_on = partial(setattr, self, "_warned", False)
            self._editor = make_editor(bold=not unstyled(), typed_on=typed_on, values=values)
        else:
            sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]

    def __call__(self, default: str = "") -> str | None:
        """default: the text that an editor starts with."""
        self._warned = not self._patient
        while True:
            try:
                return self._next(default)
            except EOFError:
                return None
            except KeyboardInterrupt:
                if self._warned:
                    return None
                self._warned = True
                click.echo("/exit, Ctrl-D or another Ctrl-C leaves the chat.", err=True)

    def confirm(self, question: str) -> bool:
        """Ask a question on the terminal; return whether the answer starts with y or Y. Ctrl-C and Ctrl-D are no."""
        click.echo(f"{question} [y/N] ", nl=False)
        try:
            return sys.stdin.readline().strip().lower().startswith("y")
        except KeyboardInterrupt:
            click.echo()
            return False

    def _next(self, default: str) -> str | None:
        if self._editor:
            text = self._editor.prompt(default=default)
            return text.encode("utf-8", "replace").decode()  # replaces lone surrogates
        click.echo(self._prompt, nl=False)
        try:
            return sys.stdin.readline() or None
        except KeyboardInterrupt:
            click.echo("\n" if self._prompt else "", nl=False)
            raise


@contextlib.contextmanager
def hidden_typing() -> Iterator[None]:
    """Keep keys pressed during an answer or a load for the next prompt instead of echoing them.

    The terminal marks pasted text if it can, so that the next prompt reads it as one message.
    """
    before, marked = termios.tcgetattr(sys.stdin), not dumb()
    silent = [*before]
    # In line mode a terminal drops input beyond 4 kB of a line, including the end mark of pasted text.
    silent[3] &= ~(termios.ECHO | (termios.ICANON if marked else 0))
    silent[3] |= termios.NOFLSH  # otherwise Ctrl-C, which stops the answer, discards typed keys
    termios.tcsetattr(sys.stdin, termios.TCSANOW, silent)
    try:
        click.echo("\x1b[?2004h" if marked else "", nl=False)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)
        click.echo("\x1b[?2004l" if marked else "", nl=False)


class StopOnInterrupt:
    """While entered, the first Ctrl-C sets `session.stopping`; a second one raises KeyboardInterrupt.

    On several ranks the second one ends the process with code 130, and ranks above 0 ignore both.
    notice: called in another thread as soon as Ctrl-C is pressed, because Python's own handler runs only after MLX
        has returned from the current prefill chunk.
    """

    def __init__(self, session: "ChatSession", notice: Callable[[], None]):
        self._session, self._notice = session, notice

    def __enter__(self) -> None:
        self._session.stopping = False
        received, self._sent = socket.socketpair()
        self._sent.setblocking(False)
        threading.Thread(target=self._watch, args=(received,), daemon=True).start()
        self._previous = signal.signal(signal.SIGINT, self._interrupt)
        self._wakeup = signal.set_wakeup_fd(self._sent.fileno(), warn_on_full_buffer=False)

    def __exit__(self, *_: Any) -> None:
        signal.set_wakeup_fd(self._wakeup)
        signal.signal(signal.SIGINT, self._previous)
        self._sent.close()  # ends the thread

    def _watch(self, received: socket.socket) -> None:
        with received:
            while number := received.recv(1):
                if number[0] == signal.SIGINT:
                    self._notice()

    def _interrupt(self, *_: Any) -> None:
        ranks = getattr(self._session, "ranks", None)
        if ranks and ranks.rank:  # rank 0 decides
            return
        if self._session.stopping:
            raise SystemExit(130) if ranks else KeyboardInterrupt
        self._session.stopping = True
