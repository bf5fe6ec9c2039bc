"""Handle keyboard input and interrupts of `mlx-mtp chat`; read plain lines without a terminal."""

import contextlib
import os
import signal
import socket
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ..session import ChatSession

# Control characters except tab and newline: a model's output must not move the cursor or change the terminal.
CONTROLS = {**dict.fromkeys([*range(9), 11, 12, *range(14, 32), *range(127, 160)], "\ufffd"), 13: None}


def printable(text: str) -> str:
    """Return a text with a visible character for each control character except tab and newline, without \\r."""
    return text.translate(CONTROLS)


def dumb() -> bool:
    """Return whether the terminal supports no escape codes."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def unstyled() -> bool:
    """Return whether dim and bold are disabled by the user (https://no-color.org) or unsupported."""
    return dumb() or bool(os.environ.get("NO_COLOR"))


def faint(text: str, *, err: bool = False) -> None:
    """Print a line, dimmed unless the terminal or the user does not allow that. err: on stderr."""
    click.echo(text if unstyled() else click.style(text, dim=True), err=err)


def make_editor(*, bold: bool, typed_on: Callable[[], None]) -> Any:
    """Return a line editor, whose `prompt()` returns a message.

    Ctrl-C calls `typed_on` and clears the line; on an empty line it raises KeyboardInterrupt. bold: of the prompt.
    """
    from prompt_toolkit import HTML, PromptSession
    from prompt_toolkit.filters import is_searching
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.layout.processors import TabsProcessor

    # The cursor's position is not needed; without this a terminal that cannot report it shows a warning.
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")

    def clear(event: Any) -> None:
        if event.current_buffer.text:
            typed_on()
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    keys.add("c-c", filter=~is_searching)(clear)
    keys.add("<sigint>")(clear)
    editor: Any = PromptSession(
        HTML("<b>&gt;</b> ") if bold else "> ",
        prompt_continuation="  ",
        key_bindings=keys,
        input_processors=[TabsProcessor(char1=" ", char2=" ")],
        enable_suspend=True,
    )
    with contextlib.suppress(AttributeError):  # another version of prompt_toolkit keeps its own behaviour
        editor.app._on_resize = partial(_resized, editor.app, editor.app._on_resize)
    return editor


def _resized(app: Any, redraw: Callable[[], None]) -> None:
    """Erase all typed lines when the terminal is resized.

    A narrower terminal wraps rows that became too long, which moves the cursor down. prompt_toolkit uses the old
    number of rows and leaves copies on the screen; it has no public hook for this.
    """
    with contextlib.suppress(Exception):  # as above
        app.renderer._cursor_pos = _reflowed(app.renderer)
    redraw()


def _reflowed(renderer: Any) -> Any:
    """Return the cursor position after the terminal has wrapped the rows above it to its new width."""
    from prompt_toolkit.data_structures import Point

    cells, cursor = renderer._last_screen.data_buffer, renderer._cursor_pos
    columns = renderer.output.get_size().columns
    ends = [max((x for x, cell in cells[y].items() if cell.char.strip()), default=0) for y in range(cursor.y)]
    return Point(x=cursor.x % columns, y=cursor.y + sum(end // columns for end in (*ends, cursor.x)))


class MessageReader:
    """Reads the user's messages from an editor (history, pasted text, Alt-Enter for a new line) or from a pipe.

    A call returns the next message, with its line end unless an editor read it, or None to leave: at the end of
    input, or after two Ctrl-C on an empty line without typing in between. The first Ctrl-C only warns; if not
    `patient` it leaves.
    """

    def __init__(self, *, interactive: bool, patient: bool = True):
        self._warned, self._patient = False, patient
        self._editor: Any = None
        self._prompt = "> " if interactive else ""
        if interactive and not dumb():
            self._editor = make_editor(bold=not unstyled(), typed_on=partial(setattr, self, "_warned", False))
        else:
            sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]

    def __call__(self) -> str | None:
        self._warned = not self._patient
        while True:
            try:
                return self._next()
            except EOFError:
                return None
            except KeyboardInterrupt:
                if self._warned:
                    return None
                self._warned = True
                click.echo("/exit, Ctrl-D or another Ctrl-C leaves the chat.", err=True)

    def _next(self) -> str | None:
        if self._editor:
            return self._editor.prompt().encode("utf-8", "replace").decode()  # replaces lone surrogates
        click.echo(self._prompt, nl=False)
        try:
            return sys.stdin.readline() or None
        except KeyboardInterrupt:
            click.echo("\n" if self._prompt else "", nl=False)
            raise


@contextlib.contextmanager
def hidden_typing() -> Iterator[None]:
    """Keep keys pressed during an answer for the next prompt instead of echoing them.

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
