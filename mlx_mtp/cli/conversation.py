"""Run the loop of `mlx-mtp chat`: read a message, answer it or run it as a command, print figures."""

import contextlib
import shutil
import sys
import textwrap
from pathlib import Path

import click

from ..decoding.options import default_chunk, default_draft_tokens
from ..decoding.stats import Stats
from ..decoding.summary import paused, percentages
from ..generate import GenerationResponse
from ..machine.errors import first_line
from ..session import ChatSession, Turn
from . import conversation_file
from .progress import PromptProgress, shows_progress
from .terminal import MessageReader, StopOnInterrupt, faint, hidden_typing, printable
from .together import follows

HELP = """\
/help        this list (also: h)
/reset       start a new conversation (r)
/system TEXT set the system prompt for later answers; without TEXT show it
/save FILE   save the conversation to a JSON file
/load FILE   continue a saved conversation
/stats       totals of the conversation
/mtp on|off  draft with the MTP heads or decode plainly: same text, other speed
             (with --kv-bits, near-ties may differ)
/exit        leave (q)"""
KEYS = "Alt-Enter starts a new line, Ctrl-C stops an answer, Ctrl-D leaves."
SHORT = {"h": "/help", "r": "/reset", "q": "/exit"}


class Chat:
    """The loop of `mlx-mtp chat`: reads lines, and answers them or runs them as commands."""

    def __init__(self, session: ChatSession, *, name: str, quiet: bool):
        self.session, self.name, self.quiet = session, name, quiet
        self.progress = shows_progress(quiet=quiet)
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.ranks = session.ranks
        self.read = MessageReader(interactive=self.interactive, patient=not self.ranks)
        self.drafts = session.num_draft_tokens or default_draft_tokens(session.model)
        self.turns: list[Turn] = []
        self._last: GenerationResponse | None = None
        self._line_ended = False

    def run(self) -> None:
        """Run until /exit, the end of input, or two Ctrl-C at the prompt, on several ranks one."""
        if self.interactive and not self.quiet:
            faint(f"{self.name} · {mtp_state(self.session)} · /help\n")
        if not self.session.tokenizer.has_chat_template:
            self._note("The tokenizer has no chat template: messages and answers form one continuous text.")
        while (line := self._next()) is not None:
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
                    self._answer(text)

    def _next(self) -> str | None:
        if self.ranks:
            return self.ranks.broadcast(None if self.ranks.rank else self.read())
        with self.session.idle() if self.interactive else contextlib.nullcontext():
            return self.read()

    def _command(self, name: str, argument: str = "") -> None:
        if argument and name in ("/help", "/reset", "/stats"):
            click.echo(f"{name} {printable(argument)[:30]}: {name} takes no argument", err=True)
        elif name == "/help":
            click.echo(HELP + "\n" + KEYS if self.interactive else HELP)
        elif name == "/reset":
            self.session.reset()
            self.turns = []
            click.echo("Started a new conversation.")
        elif name == "/stats":
            click.echo("\n".join(totals(self.session, self.turns)))
        elif name == "/mtp":
            self._set_drafting(argument)
        elif name in ("/system", "/save", "/load"):
            try:
                click.echo(getattr(self, f"_{name[1:]}")(argument))
            except (ValueError, OSError, RuntimeError) as e:
                click.echo("error: " + printable(first_line(e)), err=True)
        else:
            unknown = f"unknown command {printable(name)[:30]}"
            click.echo(f"{unknown}: /help lists them; a space before the / sends it", err=True)

    def _set_drafting(self, argument: str) -> None:
        """Run /mtp: switch drafting on or off; without an argument print the state."""
        if argument not in ("on", "off", ""):
            return click.echo(f"/mtp {printable(argument)[:30]}: expected on or off", err=True)
        if argument == "on" and not self.drafts:
            return click.echo("MTP stays off: no heads are loaded", err=True)
        if argument:
            self.session.num_draft_tokens = self.drafts if argument == "on" else 0
        click.echo(mtp_state(self.session))

    def _system(self, text: str) -> str:
        """Set the system prompt and return a confirmation; without a text return the current one."""
        if not text:
            return printable(self.session.system_prompt or "No system prompt.")
        self.session.system_prompt = text
        return "The next answer follows this system prompt."

    def _save(self, name: str) -> str:
        file = _named(name, "/save")
        if not follows():
            conversation_file.save(file, self.session)
        return f"{printable(str(file))}: {_count(len(self.session.messages), 'message')} saved"

    def _load(self, name: str) -> str:
        file = _named(name, "/load")
        if self.ranks:
            raise ValueError(
                f"/load {printable(name)}: not supported on several ranks, because not all of them have the file"
            )
        conversation_file.load(file, self.session)
        self.turns = []
        return f"{printable(str(file))}: {_count(len(self.session.messages), 'message')} loaded"

    def _answer(self, text: str) -> None:
        """Print an answer while it is generated, then its footer; also of one that Ctrl-C or an error ended.

        On several ranks an error is raised, and Ctrl-C ends the process with code 130.
        """
        self._last, trouble = None, ""
        try:
            self._stream(text)
        except KeyboardInterrupt:
            pass
        except (ValueError, RuntimeError, MemoryError) as e:
            if self.ranks:  # other ranks may still be running
                raise
            trouble = "error: " + first_line(e)
        last = self._last
        stopped = not trouble and (last is None or last.finish_reason is None)
        if last and not self._line_ended:
            click.echo()
        if trouble:
            click.echo(trouble, err=True)
        elif stopped:
            self._note("(stopped)" if last else "(stopped; the message is left out of the conversation)")
        if last:
            self._close_turn(last)
        if self.ranks and stopped:
            sys.exit(130)  # Ctrl-C has ended the launcher, too, so nothing more is read or written

    def _stream(self, text: str) -> None:
        session = self.session
        chunk = session.options.get("prefill_step_size") or default_chunk(session.model)
        progress = PromptProgress(shown=self.progress, chunk=chunk)
        typing = hidden_typing() if self.interactive else contextlib.nullcontext()
        responses = contextlib.closing(session.ask(text, progress))
        with StopOnInterrupt(session, progress.stopping), typing, progress, responses as answer:
            for self._last in answer:
                piece = printable(self._last.text)
                self._line_ended = piece.endswith("\n") if piece else self._line_ended
                click.echo(piece, nl=False)

    def _close_turn(self, last: GenerationResponse) -> None:
        turn, held = self.session.turn, self.session.cache.offset
        self.turns.append(turn)
        if not self.quiet:
            lines, width = footer(turn, last).splitlines(), shutil.get_terminal_size().columns
            faint("\n".join([*(textwrap.fill(line, width) for line in lines), ""] if self.interactive else lines))
        limit = getattr(self.session.model.args, "max_position_embeddings", None)
        if limit and held > limit >= turn.reused:
            self._note(f"The conversation exceeds the {limit:,} tokens the model supports; /reset starts a new one.")

    def _note(self, text: str) -> None:
        """Print a notice on stderr unless --quiet is given."""
        if not self.quiet:
            faint(text, err=True)


def _named(name: str, command: str) -> Path:
    """Return the path that follows a command such as /save, with ~ expanded; ValueError if none does."""
    if not name:
        raise ValueError(f"{command}: name a file, as in {command} chat.json")
    return Path(name).expanduser()


def footer(turn: Turn, last: GenerationResponse) -> str:
    """Return an answer's figures in one line, plus one line with the reason if drafting is paused."""
    stats, speed = turn.stats, "" if last.generation_tokens < 2 else f", {_short(last.generation_tps)}/s"
    reused = f"{turn.reused}/{turn.prompt_tokens} reused"
    parts = [f"{last.generation_tokens} tok{speed}", f"prompt {_short(turn.prompt_tps)}/s, {reused}"]
    if stats.cycles and stats.num_draft_tokens:
        accepted = "/".join("-" if share is None else f"{100 * share:.0f}" for share in stats.by_depth)
        accepted = f" {accepted}%" if stats.acceptance else ", nothing drafted"
        parts.append(f"{stats.tokens_per_cycle:.2f}/cycle{accepted}")
    line = " · ".join([*parts, f"{_short(stats.peak_memory / 1e9)} GB"])
    return "\n".join(filter(None, [line, paused(stats.paused)]))


def mtp_state(session: ChatSession) -> str:
    """Return whether the next answer will use drafts, as text."""
    k = session.num_draft_tokens
    most = "up to " if session.options.get("adaptive", True) else ""
    return f"MTP on, {most}{_count(k, 'draft')} per cycle" if k else "MTP off"


def totals(session: ChatSession, turns: list[Turn]) -> list[str]:
    """Return the lines of /stats; figures of drafts include only turns that could draft."""
    every, drafting = Stats(), Stats()
    for turn in turns:
        every.add(turn.stats)
        if turn.stats.num_draft_tokens:
            drafting.add(turn.stats)
    answers = [_count(len(turns), "turn"), _count(every.generation_tokens, "token")]
    if every.decode_time:
        answers.append(f"{every.generation_tokens / every.decode_time:.1f} tok/s")
    prompts, reused = sum(turn.prompt_tokens for turn in turns), sum(turn.reused for turn in turns)
    answers.append(f"prompts {prompts:,} tokens, {reused:,} of them reused")
    drafts = [mtp_state(session)]
    if drafting.cycles:
        drafts += [f"{drafting.drafts_per_cycle:.1f} verified", f"{drafting.tokens_per_cycle:.2f} tokens per cycle"]
        drafts += [f"accepted {percentages(drafting.by_depth)}", *filter(None, [paused(drafting.paused)])]
    caches = [f"caches {session.cache.offset:,} tokens, {session.cache.nbytes / 1e6:.1f} MB"]
    caches.append(f"peak {every.peak_memory / 1e9:.2f} GB")
    return [" · ".join(parts) for parts in (answers, drafts, caches)]


def _short(number: float) -> str:
    """Format a number with three digits, or with all digits before the point."""
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"
