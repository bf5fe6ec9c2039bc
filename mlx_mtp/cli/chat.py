"""`mlx-mtp chat`: a conversation in the terminal, or line by line through a pipe."""

import contextlib
import logging
import shutil
import sys
import textwrap
from typing import Any

import click

from ..demo import demo_path
from ..session import ChatSession
from .footer import Totals, footer
from .options import cache_options, generation_options, load_model, model_options, parse_json, sampling_options
from .terminal import Lines, PromptProgress, StopOnInterrupt, loading, printable

HELP = """\
/help        this list (also: h)
/reset       forget the conversation (r)
/stats       totals of the conversation
/mtp on|off  draft with the MTP heads, or decode plainly: other speed, same text
/exit        leave (q)"""
KEYS = "Alt-Enter starts a new line, Ctrl-C stops an answer, Ctrl-D leaves, the arrows bring back what you sent."
SHORT = {"h": "/help", "r": "/reset", "q": "/exit"}


@click.command(context_settings={"default_map": {"seed": 0}})
@model_options
@click.option("--system-prompt", help="System message of the chat template.")
@click.option("--max-tokens", "-m", type=click.IntRange(-1), default=256, help="Most tokens; -1 is no limit.")
@sampling_options
@click.option("--chat-template-config", callback=parse_json, help="JSON object of template variables.")
@cache_options
@click.option("--quiet", is_flag=True, help="Print the answers only: no notices, footers or progress.")
def chat(**flags: Any) -> None:
    """Chat with a model. /help lists the commands; q, r and h work as in mlx_lm.chat."""
    if flags["max_tokens"] == 0:
        raise click.BadParameter("0: allowed is 1 or more, or -1 for no limit", param_hint="--max-tokens")
    if flags["quiet"] and flags["model"] is None:
        flags["model"] = str(demo_path())  # by name, so that nothing needs to be said
    logging.getLogger("transformers").setLevel(logging.ERROR)  # it warns of long prompts, untruly
    progress = sys.stderr.isatty() and not flags["quiet"]
    with loading(shown=progress):
        model, tokenizer = load_model(flags)
    options = generation_options(model=model, tokenizer=tokenizer, flags=flags)
    session = ChatSession(
        model,
        tokenizer,
        system_prompt=flags["system_prompt"],
        template_config=flags["chat_template_config"],
        **options,
    )
    Chat(session, name=flags["model"] or "the demo", progress=progress, quiet=flags["quiet"]).run()


class Chat:
    """The loop of reading a line and answering it."""

    def __init__(self, session: ChatSession, *, name: str, progress: bool, quiet: bool):
        self.session, self.name, self.progress, self.quiet = session, name, progress, quiet
        self.interactive = sys.stdin.isatty() and sys.stdout.isatty()
        self.read = Lines(editing=self.interactive, warn=self._note)
        self.drafts = session.num_draft_tokens or len(session.model.mtp)
        self.totals = Totals()

    def run(self) -> None:
        """Until /exit, the end of input, or Ctrl-C twice at the prompt."""
        if self.interactive and not self.quiet:
            click.secho(f"{self.name} · {self._mtp_state()} · /help lists the commands\n", dim=True)
        if not self.session.tokenizer.has_chat_template:
            self._note("The tokenizer has no chat template: texts and answers are read on as one running text.")
        while (line := self.read()) is not None:
            text = line.rstrip()
            text = SHORT.get(text, text)
            if text == "/exit":
                return
            with contextlib.suppress(KeyboardInterrupt):
                self._handle(text)

    def _handle(self, text: str) -> None:
        if text.startswith("/") and "\n" not in text:
            self._command(*text.split(maxsplit=1))
        elif text:
            self._answer(text)

    def _command(self, name: str, argument: str = "") -> None:
        if name == "/help":
            click.echo(HELP + "\n" + KEYS if self.interactive else HELP)
        elif name == "/reset":
            self.session.reset()
            self.totals = Totals()
            click.echo("The conversation begins anew.")
        elif name == "/stats":
            click.echo("\n".join(self.totals.lines(self.session)))
        elif name == "/mtp":
            click.echo(self._switch(argument))
        else:
            self._note(f"unknown command {printable(name)[:30]}: /help lists them; a space before the / sends it")

    def _switch(self, argument: str) -> str:
        """Turn drafting on or off; the reply."""
        if argument not in ("on", "off", ""):
            return f"/mtp {printable(argument)[:30]}: allowed are on and off"
        if argument == "on" and not self.drafts:
            return "MTP stays off: no heads are loaded"
        if argument:
            self.session.num_draft_tokens = self.drafts if argument == "on" else 0
        return self._mtp_state()

    def _mtp_state(self) -> str:
        k = self.session.num_draft_tokens
        return f"MTP on, {k} drafts per cycle" if k else "MTP off"

    def _answer(self, text: str) -> None:
        """One turn: the answer as it comes, and its footer."""
        last, end, trouble = None, "", ""
        progress = PromptProgress(shown=self.progress, chunk=self.session.options["prefill_step_size"])
        try:
            with StopOnInterrupt(self.session), progress:
                with contextlib.closing(self.session.ask(text, progress)) as responses:
                    for last in responses:
                        end = last.text or end
                        click.echo(printable(last.text), nl=False)
        except KeyboardInterrupt:
            trouble = "(stopped)"
        except (ValueError, RuntimeError, MemoryError) as e:
            trouble = "error: " + (str(e).splitlines() or [type(e).__name__])[0]
        if last is None:
            return self._note(f"{trouble or '(stopped)'} The message is left out of the conversation.")
        click.echo("" if end.endswith("\n") else "\n", nl=False)
        if last.finish_reason is None:
            self._note(trouble or "(stopped)")
        self.totals.add(self.session.turn)
        if not self.quiet:
            line = footer(self.session.turn, last)
            width = shutil.get_terminal_size().columns
            click.secho(textwrap.fill(line, width) + "\n" if self.interactive else line, dim=True)

    def _note(self, text: str) -> None:
        """Something to know, on stderr."""
        if not self.quiet:
            click.secho(text, dim=True, err=True)
