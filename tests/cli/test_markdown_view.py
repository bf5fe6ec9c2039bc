"""Stream Markdown into a simulated screen; compare with the same text shown at once."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweep import SWEEP

from mlx_mtp.cli import markdown_view
from mlx_mtp.cli.markdown_view import MarkdownView, blocks

TEXT = """# Title

Some *text* with `code`, **bold**, a [link](http://x.y/z) and <b>html</b>, a picture ![p](q.png).
Second line. [ref]: http://a.b

1. one
2. two

   inside

   - deeper

```python
def f(x):
    return x + 1  # a comment

print(f(1))
```

| a | b |
|---|---|
| 1 | 2 |

> quoted &lt;

Header
------
[ref]: http://a.b

    indented code

***
end <script>alert(1)</script>"""
SEEN = ("Title", "html", "http://x.y/z", "q.png", "Second line.", "http://a.b", "deeper", "# a comment", "quoted <")
SEEN += ("<b>", "</b>", "indented code", "<script>alert(1)</script>")


class Screen:
    """A terminal of unlimited height that supports the escape codes of the view."""

    def __init__(self, height):
        self.lines, self.row, self.column, self.height = [""], 0, 0, height

    def write(self, text):
        for piece in re.findall(r"\x1b\[\d*[A-Za-z]|\x1b\[[\d;]*m|[^\x1b]", text):
            if piece == "\n":
                self.row, self.column = self.row + 1, 0
                self.lines += [""] * (self.row + 1 - len(self.lines))
            elif piece == "\r":
                self.column = 0
            elif piece.endswith("A") and len(piece) > 1:
                self.row -= int(piece[2:-1])
                assert self.row > len(self.lines) - 1 - self.height  # the cursor cannot leave the screen
            elif piece == "\x1b[J":
                self.lines[self.row :] = [self.lines[self.row][: self.column]]
            elif not piece.startswith("\x1b"):
                self.lines[self.row] = self.lines[self.row][: self.column] + piece
                self.column += 1

    @property
    def text(self):
        return "\n".join(line.rstrip() for line in self.lines).rstrip()


def shown(pieces, monkeypatch, *, width=60, height=50):
    """The screen after a view has shown pieces, each a text or (text, reasoning)."""
    screen = Screen(height)
    monkeypatch.setattr(markdown_view.click, "echo", lambda text="", nl=True: screen.write(text + "\n" * nl))
    monkeypatch.setattr(markdown_view, "FASTEST", 0.0)
    monkeypatch.setattr(markdown_view, "SHARE", 0)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", str(height))
    view = MarkdownView()
    for piece in pieces:
        text, reasoning = (piece, False) if isinstance(piece, str) else piece
        view.add(text, reasoning=reasoning)
    view.close()
    return screen.text


@pytest.mark.parametrize(("width", "height"), [(60, 50), (24, 50), (60, 6)])
def test_streamed_text_is_that_shown_at_once(monkeypatch, width, height):
    if height == 50:
        pieces = [TEXT[i : i + 7] for i in range(0, len(TEXT), 7)]
        assert shown(pieces, monkeypatch, width=width) == shown([TEXT], monkeypatch, width=width)
    else:  # lines above the screen are not redrawn, but the code keeps its lines
        code = "```\n" + "".join(f"line {i}\n" for i in range(20)) + "```"
        assert shown(code.splitlines(True), monkeypatch, height=height).split("\n") == [
            f"line {i}" for i in range(20)
        ]


def test_every_text_is_visible(monkeypatch):
    text = shown([TEXT], monkeypatch, width=200)
    assert [each for each in SEEN if each not in text] == []


def test_line_breaks_are_kept_and_words_wrap(monkeypatch):
    assert shown(["one\ntwo"], monkeypatch) == "one\ntwo"
    assert shown(["several words wrap"], monkeypatch, width=10) == "several\nwords wrap"
    assert shown(["x" * 25], monkeypatch, width=10) == "x" * 10 + "\n" + "x" * 10 + "\n" + "x" * 5


def test_reasoning_is_dim_text_and_separated(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    pieces = [("so *this*", True), (" is\n\nit", True), "**That**", " is"]
    assert shown(pieces, monkeypatch) == "so *this* is\n\nit\n\nThat is"
    written = []
    monkeypatch.setattr(markdown_view.click, "echo", lambda text="", nl=True: written.append(text))
    view = MarkdownView()
    view.add("so", reasoning=True)
    view.add("that")
    assert written[0] == "\x1b[2mso\x1b[0m"
    view.close()
    assert written[-2].endswith("\nthat")


def test_control_characters_do_not_reach_the_terminal(monkeypatch, capsys):
    view = MarkdownView()
    view.add("a\x1b[2Jb\x07\x9b")
    view.add("c\x1b]0;title\x07", reasoning=True)
    view.close()
    out = capsys.readouterr().out
    assert "\x07" not in out
    assert "\x9b" not in out
    assert not re.search(r"\x1b(\[2J|\])", out)


@given(st.lists(st.sampled_from(["a", " ", "\n", "\n\n", "- ", "1. ", "> ", "```", "`", "|", "#", "    ", "---\n"])))
@settings(max_examples=2000 if SWEEP else 60, deadline=None)
def test_only_the_last_block_changes(words):
    whole = blocks("".join(words))
    for n in range(len(words)):
        begun = "".join(words[:n])
        final = blocks(begun[: begun.rfind("\n") + 1])[:-1]
        assert whole[: len(final)] == final
