"""Make the line editor of `mlx-mtp chat` of prompt_toolkit."""

import contextlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from prompt_toolkit import HTML, PromptSession
from prompt_toolkit.data_structures import Point
from prompt_toolkit.filters import is_searching
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.layout.processors import TabsProcessor


def make_editor(*, bold: bool, typed_on: Callable[[], None]) -> PromptSession[str]:
    """Make an editor: Ctrl-C empties the line and calls `typed_on`; on an empty line it raises KeyboardInterrupt."""
    # Nothing here needs the cursor's position; a terminal that does not tell it would get a warning.
    os.environ.setdefault("PROMPT_TOOLKIT_NO_CPR", "1")

    def clear(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            typed_on()
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    keys = KeyBindings()
    keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
    keys.add("c-c", filter=~is_searching)(clear)
    keys.add("<sigint>")(clear)
    editor: PromptSession[str] = PromptSession(
        HTML("<b>&gt;</b> ") if bold else "> ",
        prompt_continuation="  ",
        key_bindings=keys,
        input_processors=[TabsProcessor(char1=" ", char2=" ")],
        enable_suspend=True,
    )
    app: Any = editor.app
    with contextlib.suppress(AttributeError):  # another prompt_toolkit: its own behaviour is good enough
        app._on_resize = partial(_resized, app, app._on_resize)
    return editor


def _resized(app: Any, redraw: Callable[[], None]) -> None:
    """Erase all of the typed lines when the terminal is resized.

    A terminal made narrower breaks rows that became too long, which moves the cursor down; prompt_toolkit counts
    the rows of before and leaves copies behind. It has no public hook for this.
    """
    with contextlib.suppress(Exception):  # likewise
        app.renderer._cursor_pos = _reflowed(app.renderer)
    redraw()


def _reflowed(renderer: Any) -> Point:
    """Find the cursor after the terminal broke the rows above it to its new width."""
    cells, cursor = renderer._last_screen.data_buffer, renderer._cursor_pos
    columns = renderer.output.get_size().columns
    ends = [max((x for x, cell in cells[y].items() if cell.char.strip()), default=0) for y in range(cursor.y)]
    return Point(x=cursor.x % columns, y=cursor.y + sum(end // columns for end in (*ends, cursor.x)))
