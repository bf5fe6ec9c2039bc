"""Run the loop of `mlx-mtp chat`: read a message, answer it or run it as a command, print figures."""

import contextlib
import re
import sys
from collections.abc import Callable, Sequence

import click

from ..decoding.options import default_chunk, default_draft_tokens
from ..generate import GenerationResponse
from ..machine.errors import first_line
from ..pictures.rows import Picture
from ..session import ChatSession, Turn
from .answer_view import MarkdownAnswer, PlainAnswer
from .chat_figures import context_used, footer, mtp_state
from .progress import PromptProgress, shows_progress
from .terminal import (
    MessageReader,
    StopOnInterrupt,
    faint,
    hidden_typing,
    is_interactive,
    printable,
    unstyled,
    wrapped,
)

SHORT = {"h": "/help", "r": "/reset", "q": "/exit"}
File = tuple[str, str]  # name, text
Execute = Callable[["ChatLoop", str, str], str]


class ChatLoop:
    """The loop of `mlx-mtp chat`: reads lines, and answers them or runs them as commands.

    files: (name, text) of the files for the next message. sent: those of the last message. pictures: for the next
    message. edits: whether the next line replaces the last message. penalties: mlx-lm's penalties by name.
    """

    def __init__(
        self, session: ChatSession, read: MessageReader, execute: Execute, *, name: str, quiet: bool,
        penalties: dict[str, float],
    ):  # fmt: skip
        """execute: runs a command, (chat, name, argument) -> what to print; ValueError or OSError if it fails."""
        self.session, self.read, self._execute, self.name, self.quiet = session, read, execute, name, quiet
        self.progress = shows_progress(quiet=quiet)
        self.interactive = is_interactive()
        self.ranks = session.ranks
        self.drafts = session.num_draft_tokens or default_draft_tokens(session.model)
        self.penalties = penalties
        self.edits = self._thinks = False
        self._last: GenerationResponse | None = None
        self.start_over()

    def start_over(self) -> None:
        """Drop the turns, typed text, files and pictures of the previous conversation; the session is unchanged."""
        self.turns: list[Turn] = []
        self.pictures: list[Picture] = []
        self.files: list[File] = []
        self.sent: list[File] = []
        self._typed: str | None = None

    def run(self, notice: str = "") -> None:
        """Run until /exit, the end of input, or two Ctrl-C on an empty line (on several ranks one).

        notice: printed before the first prompt of a terminal, unless quiet.
        """
        if self.interactive and not self.quiet:
            head = f"{self.name} · {mtp_state(self.session)} · /help"
            faint(wrapped("\n".join(filter(None, [head, notice]))) + "\n")
        if not self.session.tokenizer.has_chat_template:
            self._note("The tokenizer has no chat template: messages and answers form one continuous text.")
        while (line := self._next()) is not None:
            edits, self.edits = self.edits, False
            text = line.rstrip()
            text = SHORT.get(text, text)
            name, *argument = text.split(None, 1) if text.startswith("/") else [""]
            if "\n" in text and name != "/system":  # pasted text, not a command
                name = ""
            if name == "/exit":
                return
            with contextlib.suppress(KeyboardInterrupt):
                if name:
                    self._command(name, *argument)
                elif text:
                    self._message(text, edits=edits)

    def _next(self) -> str | None:
        if self.ranks:
            return self.ranks.broadcast(None if self.ranks.rank else self._read())
        with self.session.idle() if self.interactive else contextlib.nullcontext():
            return self._read()

    def _read(self) -> str | None:
        return self.read(default=(self._typed or self.session.last_message) if self.edits else "")

    def confirm(self, question: str) -> bool:
        """Return whether the user agrees to a question; without a terminal, and on several ranks, False unasked."""
        return self.interactive and not self.ranks and self.read.confirm(question)

    def _command(self, name: str, argument: str = "") -> None:
        try:
            if printed := self._execute(self, name, argument):
                click.echo(printed if name == "/help" else wrapped(printed))
        except OSError as e:
            reason = (e.strerror or str(e)).lower()
            _print_error(f"{e.filename}: {reason}" if e.filename else reason)
        except (ValueError, RuntimeError) as e:
            _print_error(first_line(e))

    def with_files(self, text: str, files: list[File]) -> str:
        """Return a message's text: the files, each in a code block under its name, then `text`. Sets `sent`."""
        self.sent, blocks = files, []
        for name, content in files:
            fence = "`" * max(3, 1 + max(map(len, re.findall("`+", content)), default=0))
            blocks.append(f"{name}:\n{fence}\n{content.rstrip()}\n{fence}\n\n")
        return "".join(blocks) + text

    def replace_last(self, text: str) -> None:
        """Replace the last message's text, but not its pictures, and answer it.

        If no token is generated, the conversation stays as it was. ValueError without a message.
        """
        before, pictures = self.session.messages, self.session.last_pictures
        self.session.take_back()
        self._answer(text, pictures)
        if len(self.session.messages) < len(before):
            self.session.messages = before

    def _message(self, text: str, *, edits: bool) -> None:
        """Answer a message that the user has typed.

        edits: it replaces the last message, and has the same files and pictures as that.
        """
        self._typed = text
        if edits:
            return self.replace_last(self.with_files(text, self.sent))
        (files, self.files), (pictures, self.pictures) = (self.files, []), (self.pictures, [])
        self._answer(self.with_files(text, files), pictures)

    def _answer(self, text: str, pictures: Sequence[Picture]) -> None:
        """Print an answer while it is generated, then its footer; also of one that Ctrl-C or an error ended.

        On several ranks an error is raised, and Ctrl-C ends the process with code 130.
        """
        self._last, trouble = None, ""
        try:
            self._stream(text, pictures)
        except KeyboardInterrupt:
            pass
        except (ValueError, RuntimeError, MemoryError) as e:
            if self.ranks:  # other ranks may still be running
                raise
            trouble = first_line(e)
        last = self._last
        stopped = not trouble and (last is None or last.finish_reason is None)
        if trouble:
            _print_error(trouble)
        elif stopped:
            self._note("(stopped)" if last else "(stopped; the message is left out of the conversation)")
        if last:
            self._close_turn(last)
        if self.ranks and stopped:
            sys.exit(130)  # Ctrl-C has ended the launcher, too, so nothing more is read or written

    def _stream(self, text: str, pictures: Sequence[Picture]) -> None:
        session = self.session
        chunk = session.options.get("prefill_step_size") or default_chunk(session.model)
        progress = PromptProgress(shown=self.progress, chunk=chunk)
        typing = hidden_typing() if self.interactive else contextlib.nullcontext()
        view = MarkdownAnswer(session) if self.interactive and not unstyled() else PlainAnswer()
        responses = contextlib.closing(session.ask(text, progress, pictures))
        with StopOnInterrupt(session, progress.stopping), typing, progress, responses as answer, view:
            progress.begin()  # the template and the tokens of a long conversation take time before the prefill
            for self._last in answer:
                progress.end()
                view.add(self._last.text)
        self._thinks = view.reasoning

    def _close_turn(self, last: GenerationResponse) -> None:
        turn, held, limit = self.session.turn, self.session.cache.offset, self.session.positions
        self.turns.append(turn)
        if last.finish_reason == "length":
            self._note(self._limit_reached(last))
        if not self.quiet:
            figures = footer(turn, last, context_used(self.session))
            faint(wrapped(figures) + "\n" if self.interactive else figures)
        if limit and held > limit >= turn.reused:
            self._note(f"The conversation exceeds the {limit:,} tokens the model supports; /reset starts a new one.")

    def _limit_reached(self, last: GenerationResponse) -> str:
        """Return a notice of the limit, of the context or of max_tokens, at which the answer was cut."""
        most, where = self.session.options.get("max_tokens"), " during its reasoning" if self._thinks else ""
        if most == -1:
            return f"(cut{where}: the context of {self.session.positions:,} tokens is full; /reset starts a new one)"
        return f"(cut{where} at {last.generation_tokens:,} tokens; /set max_tokens -1 removes the limit)"

    def _note(self, text: str) -> None:
        """Print a notice on stderr unless --quiet is given."""
        if not self.quiet:
            faint(text, err=True)


def _print_error(problem: str) -> None:
    """Print why a command or an answer failed on stderr, wrapped at words in a terminal."""
    click.echo(wrapped(f"error: {printable(problem)}"), err=True)
