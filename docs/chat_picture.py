"""Draw docs/chat.svg: the screen of a terminal in which `mlx-mtp chat` answered questions.

pip install pyte && python docs/chat_picture.py

The session is real: the program runs in a pseudo-terminal, and pyte interprets its output. On a busy machine drafting
may be paused; such a session is repeated, up to 20 times.
"""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.text import Text

PICTURE = Path(__file__).with_name("chat.svg")
QUESTIONS = ("What does os.path.join do?", "What does len do?")
COLUMNS, ROWS = 100, 20
RUNS, SECONDS = 20, 60.0  # at most: sessions, and seconds without output
DIM = "blink"  # pyte has no dim text; this attribute, which the chat does not use, stands for it


class Screen(pyte.Screen):
    """A screen that answers the program's questions, such as the cursor's position."""

    terminal = -1

    def write_process_input(self, data: str) -> None:
        os.write(self.terminal, data.encode())


def chat() -> Screen:
    """Return the screen after the questions were answered."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(ROWS)}
    command = [sys.executable, "-m", "mlx_mtp", "chat"]
    process = subprocess.Popen(command, stdin=end, stdout=end, stderr=end, env=env, start_new_session=True)
    screen = Screen(COLUMNS, ROWS)
    screen.terminal = terminal
    stream = pyte.ByteStream(screen)
    try:
        for question in QUESTIONS:
            until_prompt(terminal, stream, screen)
            os.write(terminal, question.encode() + b"\r")
        until_prompt(terminal, stream, screen)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
        os.close(end)
    return screen


def until_prompt(terminal: int, stream: pyte.ByteStream, screen: Screen) -> None:
    """Show the program's output until the program has waited at an empty prompt for half a second."""
    quiet, until = 0.0, time.monotonic() + SECONDS
    while quiet < 0.5 or screen.display[screen.cursor.y].strip() != ">":
        if time.monotonic() > until:
            sys.exit("\n".join(["no prompt:", *screen.display]))
        if select.select([terminal], [], [], 0.1)[0]:
            stream.feed(os.read(terminal, 65536))
            quiet, until = 0.0, time.monotonic() + SECONDS
        else:
            quiet += 0.1


def style_of(char: pyte.screens.Char) -> Style:
    """Return a character's colour and attributes as rich has them."""
    colour = None if char.fg == "default" else f"#{char.fg}" if re.fullmatch("[0-9a-f]{6}", char.fg) else char.fg
    return Style(color=colour, bold=char.bold, italic=char.italics, dim=getattr(char, DIM))


def line_of(screen: Screen, row: int) -> Text:
    """Return a row of the screen as text with its colours."""
    text = Text()
    for style, chars in groupby((screen.buffer[row][column] for column in range(COLUMNS)), style_of):
        text.append("".join(char.data for char in chars), style)
    text.rstrip()
    return text


def svg(screen: Screen) -> str:
    """Return the screen down to its last text as SVG, without a font from the web."""
    lines = [line_of(screen, row) for row in range(ROWS)]
    while not lines[-1].plain.strip(" >"):
        lines.pop()
    with open(os.devnull, "w") as nowhere:
        console = Console(width=COLUMNS, record=True, file=nowhere, force_terminal=True, legacy_windows=False)
        for line in lines:
            console.print(line, no_wrap=True, crop=True)
    drawn = console.export_svg(title="mlx-mtp chat", unique_id="chat")
    return re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.DOTALL)


def main() -> None:
    pyte.graphics.TEXT[2] = f"+{DIM}"
    for _ in range(RUNS):
        screen = chat()
        shown = "\n".join(screen.display)
        if "paused" not in shown and "nothing drafted" not in shown:
            PICTURE.write_text(svg(screen))
            return
    sys.exit(f"drafting was paused in each of {RUNS} sessions")


if __name__ == "__main__":
    main()
