"""Show an answer in a terminal while it is generated: Markdown in colour, wrapped at words, reasoning dimmed."""

import io
import itertools
import re
import time
from typing import ClassVar

import click
from markdown_it import MarkdownIt
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown, MarkdownElement
from rich.syntax import Syntax
from rich.text import Text

from .terminal import printable, terminal_size

FASTEST = 0.05  # seconds between two redraws, at least
SHARE = 20  # a redraw waits this many times as long as the last one took, so that decoding is not slowed down
# HTML, pictures and link definitions would not be shown, so they stay text.
PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable(["image", "reference"])
STRUCTURE = MarkdownIt("commonmark", {"html": False}).enable(["table"]).disable(["reference", "inline"])
LINES = re.compile(r"\n(?=[^\n]*\S[^\n]*\Z)")  # the end of the last line but one, if the last one is not blank
PADDING = re.compile(r" +((?:\x1b\[[\d;]*m)*)$", re.MULTILINE)


class _Code(CodeBlock):
    """A code block without padding or background, so that copied lines are the code."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Syntax(str(self.text).rstrip(), self.lexer_name, theme="ansi_dark", word_wrap=True)


class _Heading(Heading):
    """A heading at the left margin."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class AnswerMarkdown(Markdown):
    """Markdown that shows every character of a text but the marks themselves, and keeps its line breaks."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "fence": _Code,
        "code_block": _Code,
        "heading_open": _Heading,
    }

    def __init__(self, text: str):
        super().__init__("", hyperlinks=False)
        self.parsed = PARSER.parse(text)
        for block in self.parsed:
            for part in block.children or ():
                part.type = "hardbreak" if part.type == "softbreak" else part.type


def blocks(text: str) -> list[str]:
    """Return a Markdown text's top-level blocks; the newline between two blocks is left out.

    More lines after a text that ends with a newline, or is empty, can only change its last block.
    """
    starts = [block.map[0] for block in STRUCTURE.parse(text) if block.level == 0 and block.map]
    lines = text.split("\n")
    return ["\n".join(lines[a:b]) for a, b in itertools.pairwise([0, *starts[1:], len(lines)])]


class MarkdownView:
    """Shows a text that arrives in pieces; the last block is redrawn as it grows, the lines above it are final."""

    def __init__(self) -> None:
        self._text, self._reasoning = "", False  # of the last block
        self._above = False  # whether something of the answer is above the last block
        self._final = 0  # lines of the last block that are above the screen
        self._drawn: list[int] = []  # the widths in cells of its other lines, which a redraw erases
        self._due = 0.0

    def add(self, text: str, *, reasoning: bool = False) -> None:
        """Append text to the answer. reasoning: it is dimmed, without Markdown."""
        if reasoning != self._reasoning:
            self.close()
            self._reasoning = reasoning
        self._text += printable(text)
        if time.monotonic() >= self._due:
            self._draw()

    def close(self) -> None:
        """Show what is not shown yet, and end the line."""
        self._text = self._text.rstrip("\n")
        self._draw()
        self._finish(self._text)
        self._text = ""

    def _draw(self) -> None:
        began = time.perf_counter()
        if self._reasoning:
            *final, self._text = LINES.split(self._text, 1)
        else:
            ended = self._text.rfind("\n") + 1
            *final, rest = blocks(self._text[:ended])
            self._text = rest + self._text[ended:]
        for block in final:
            self._finish(block)
        self._show(self._lines(self._text))
        self._due = time.monotonic() + max(FASTEST, SHARE * (time.perf_counter() - began))

    def _finish(self, block: str) -> None:
        """Show the last block's final form, and end the line."""
        if lines := self._lines(block):
            self._show(lines)
            click.echo()
            self._above = True
        self._final, self._drawn = 0, []

    def _lines(self, text: str) -> list[str]:
        """Return a text's rendered lines, with a blank line before each block of Markdown but the answer's first."""
        found: list[str] = []
        for block in [text] if self._reasoning else blocks(text):
            lines = self._rendered(block) if block.strip() else []
            found += ["", *lines] if lines and not self._reasoning and (self._above or found) else lines
        return found

    def _rendered(self, block: str) -> list[str]:
        console = Console(width=terminal_size().columns, force_terminal=True, file=io.StringIO(), highlight=False)
        with console.capture() as captured:
            console.print(Text(block, "dim") if self._reasoning else AnswerMarkdown(block))
        lines = PADDING.sub(r"\1", captured.get()).split("\n")[:-1]
        while lines and not self._reasoning and not click.unstyle(lines[-1]).strip():
            del lines[-1]
        return lines

    def _show(self, lines: list[str]) -> None:
        """Redraw the last block as `lines`; those that have left the screen at the top stay as they were shown."""
        size, shown = terminal_size(), lines[self._final :]
        if not shown:
            return
        rows = sum(max(1, -(-width // size.columns)) for width in self._drawn)  # a narrower terminal wrapped them
        erase = f"\x1b[{rows - 1}A" if rows > 1 else ""
        click.echo((f"\r{erase}\x1b[J" if rows else "") + "\n".join(shown), nl=False)
        self._drawn = [cell_len(click.unstyle(line)) for line in shown[-max(1, size.lines - 1) :]]
        self._final = len(lines) - len(self._drawn)
