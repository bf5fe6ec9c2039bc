"""Edit the lines of `mlx-mtp chat`: keys, completion of commands and paths, history of all sessions."""

import contextlib
import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from prompt_toolkit import HTML, PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.filters import is_searching
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.layout.processors import TabsProcessor

from ..machine.remembered import cache_directory

LONGEST = 1_000_000  # bytes of history; a longer file is deleted
Values = dict[str, Iterable[str] | None]


class CommandCompleter(Completer):
    """Completes commands, and what follows them: one of a command's words, or a path where the words are None.

    Text that is not a command has no completions.
    """

    def __init__(self, values: Values):
        self._values, self._paths = values, PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if not text.startswith("/") or "\n" in text:
            return
        name, space, rest = text.partition(" ")
        if not space:
            yield from (Completion(each, -len(name)) for each in self._values if each.startswith(name))
        elif name in self._values and (words := self._values[name]) is not None:
            yield from (Completion(each, -len(rest)) for each in words if each.startswith(rest))
        elif name in self._values:
            yield from self._paths.get_completions(Document(rest, len(rest)), complete_event)


def make_editor(*, bold: bool, typed_on: Callable[[], None], values: Values) -> Any:
    """Return a prompt_toolkit session, whose `prompt()` returns a message.

    If nothing is typed yet, Ctrl-D raises EOFError and Ctrl-C KeyboardInterrupt; later Ctrl-C calls `typed_on` and
    clears the message. bold: show the prompt in bold. values: the completions of each command, as `CommandCompleter`
    takes them.
    """
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
        history=kept_history(),
        completer=CommandCompleter(values),
        complete_while_typing=False,
        reserve_space_for_menu=0,
    )
    with contextlib.suppress(AttributeError):  # another version of prompt_toolkit keeps its own behaviour
        editor.app._on_resize = partial(_resized, editor.app, editor.app._on_resize)
    return editor


def kept_history() -> History:
    """Return the history of earlier sessions, in a file that is created so that only the user can read it.

    A file larger than LONGEST bytes is deleted first. If it cannot be written, the history is this session's alone.
    """
    try:
        file = cache_directory("chat") / "history"
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and file.stat().st_size > LONGEST:
            file.unlink()
        os.close(os.open(file, os.O_CREAT | os.O_APPEND | os.O_RDWR, 0o600))
        return FileHistory(str(file))
    except (OSError, RuntimeError):
        return InMemoryHistory()


def _resized(app: Any, redraw: Callable[[], None]) -> None:
    """Let prompt_toolkit's `redraw` erase all rows of the typed lines when the terminal is resized.

    A narrower terminal wraps rows that became too long, which moves the cursor down. prompt_toolkit uses the old
    number of rows and leaves copies on the screen; it has no public hook for this.
    """
    with contextlib.suppress(Exception):  # as above
        app.renderer._cursor_pos = _reflowed(app.renderer)
    redraw()


def _reflowed(renderer: Any) -> Any:
    """Return the cursor's Point, from the prompt's first row, after the terminal wrapped rows to its new width."""
    from prompt_toolkit.data_structures import Point

    cells, cursor = renderer._last_screen.data_buffer, renderer._cursor_pos
    columns = renderer.output.get_size().columns
    ends = [max((x for x, cell in cells[y].items() if cell.char.strip()), default=0) for y in range(cursor.y)]
    return Point(x=cursor.x % columns, y=cursor.y + sum(end // columns for end in (*ends, cursor.x)))
