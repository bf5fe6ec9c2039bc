"""Show an answer while it is generated: its text unchanged, or in a terminal as Markdown with dimmed reasoning."""

from typing import Any

import click

from ..session import ChatSession
from .terminal import printable


class PlainAnswer:
    """Prints the text of an answer as it arrives; the end of the `with` block ends its last line.

    reasoning: always False, because marks of reasoning are printed as text.
    """

    reasoning = False

    def __init__(self) -> None:
        self._begun = self._open = False  # open: the last line is not ended

    def __enter__(self) -> "PlainAnswer":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._open:
            click.echo()

    def add(self, text: str) -> None:
        """Print the next piece of the answer."""
        piece = printable(text)
        self._open = not piece.endswith("\n") if piece else self._open or not self._begun
        self._begun = True
        click.echo(piece, nl=False)


class MarkdownAnswer:
    """Shows an answer as Markdown, and its reasoning dimmed; at the end of the `with` block everything is shown.

    reasoning: whether the answer ended inside reasoning; False before the end of the block.
    """

    def __init__(self, session: ChatSession):
        from .markdown_view import MarkdownView

        self._session, self._view, self._splitter = session, MarkdownView(), None
        self.reasoning = False

    def __enter__(self) -> "MarkdownAnswer":
        return self

    def __exit__(self, *_: Any) -> None:
        if self._splitter:
            self.reasoning = self._splitter.reasoning
            self._show(self._splitter.end(cut=True))
        self._view.close()

    def add(self, text: str) -> None:
        """Show the next piece of the answer."""
        if self._splitter is None:
            self._splitter = _splitter(self._session)
        self._show(self._splitter.feed(text))

    def _show(self, parts: list[Any]) -> None:
        for part in parts:
            self._view.add(part.text, reasoning=part.reasoning)


def _splitter(session: ChatSession) -> Any:
    """Return a splitter of reasoning and content; it starts in reasoning if the session's last prompt ends in it."""
    from ..serve.answer import Splitter
    from ..serve.frames import FramedSplitter, begun_in, ends_in_reasoning, frames_of

    tokenizer, prompt = session.tokenizer, session.cache.ids[: session.turn.prompt_tokens]
    if frames := frames_of(tokenizer):
        return FramedSplitter(frames, Splitter(tokenizer, ()), begun_in(frames, tokenizer.decode(prompt)))
    return Splitter(tokenizer, (), thinking=tokenizer.has_thinking, begun=ends_in_reasoning(tokenizer, prompt))
