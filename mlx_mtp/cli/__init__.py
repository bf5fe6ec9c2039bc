"""Define the command line; apart from `bench/`, only this package prints."""

import os
import re
import signal
import sys
import threading
import warnings
from typing import Any, NoReturn

import click

from .._version import __version__
from ..machine.errors import FULL, first_line
from ..ranks.watch import wait_for_reason
from .bench import bench
from .cache_prompt import cache_prompt
from .chat import chat
from .convert import convert
from .doctor import doctor
from .draft_vocab import draft_vocab
from .generate import generate
from .inspect import inspect
from .models import models
from .pull import pull
from .serve import serve
from .terminal import print_above, printable
from .together import as_rank, check_command, error_line, follows
from .tune_heads import tune_heads
from .verify_lossless import verify_lossless

CLICK_TYPE = re.compile(r"a valid (float|integer)(?: range)?(?=\.?$)")  # in "'x' is not a valid float range."
KINDS = {"float": "a number", "integer": "an integer"}


class OneLine(click.Group):
    """A group of commands whose errors are one line on stderr, without usage or traceback.

    Exit codes: 2 if the command line is wrong in itself or for this model; 1 if something failed, such as a file, the
    hub or memory; 130 after Ctrl-C, which chat and serve handle themselves; 141 if the reader of the output has gone;
    143 after SIGTERM. A command may end with codes of its own.
    """

    def main(self, *args: Any, **options: Any) -> Any:
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            if getattr(sys, name) is None:  # the caller closed it
                setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the process ends
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
        warnings.showwarning = lambda message, *_, **__: print_above(f"warning: {printable(str(message))}")
        sys.unraisablehook = _unraisable
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # runs the `finally` blocks that restore a terminal
        with as_rank():
            self._run(*args, **options)

    def _run(self, *args: Any, **options: Any) -> None:
        """Run a command; on failure raise SystemExit, mostly after an error line. With MLX_MTP_DEBUG
        unexpected exceptions are raised unchanged."""
        try:
            super().main(*args, **{**options, "standalone_mode": False})
            sys.stdout.flush()
        except click.ClickException as e:
            message = CLICK_TYPE.sub(lambda kind: KINDS[kind[1]], e.format_message())
            _fail(message, e.exit_code)
        except (click.Abort, KeyboardInterrupt):
            sys.exit(130)
        except BrokenPipeError:
            sys.exit(_discard_output())
        except (ValueError, OSError, RuntimeError, MemoryError) as e:
            wait_for_reason(e)
            if isinstance(e, OSError) and e.errno in FULL:
                e.filename = e.filename or "standard output"  # errors of written files name the file
            _fail(*_with_flag(first_line(e)))
        except Exception as e:
            if os.environ.get("MLX_MTP_DEBUG"):
                raise
            _fail(f"unexpected {type(e).__name__}: {first_line(e)}; MLX_MTP_DEBUG=1 shows where", 1)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            sys.exit(_discard_output())  # click itself would exit with 1


def _unraisable(raised: Any) -> None:
    """Send Ctrl-C or SIGTERM again if it arrived in a finalizer, where its exception is lost, after the finalizer.

    Other exceptions of finalizers are shown as Python shows them.
    """
    if raised.exc_type in (KeyboardInterrupt, SystemExit):
        again = signal.SIGINT if raised.exc_type is KeyboardInterrupt else signal.SIGTERM
        timer = threading.Timer(0.01, os.kill, (os.getpid(), again))
        timer.daemon = True
        timer.start()
    else:
        sys.__unraisablehook__(raised)


def _fail(message: str, code: int) -> NoReturn:
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
    if line := error_line(printable(message), code):
        click.echo(line, file=sys.__stderr__ if follows() else None, err=True)
    sys.exit(code)


def _discard_output() -> int:
    """Send output that has no reader to /dev/null, so that exiting prints no traceback; return the exit code 141."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


def _with_flag(message: str) -> tuple[str, int]:
    """Add the flag to a library error such as "top_k=9: ..."; return the message and the exit code.

    The code is 2 for an option of a command or a variable MLX_MTP_..., which are the user's, and 1 for other errors.
    """
    name = re.match(r"(\w+)=", message)
    commands = [*main.commands.values(), *bench.commands.values()]
    flags = {param.name: param.opts[0] for command in commands for param in command.params}
    if name and name[1] in flags:
        return f"Invalid value for '{flags[name[1]]}': {message}", 2
    return message, 2 if name and name[1].startswith("MLX_MTP_") else 1


@click.group(
    cls=OneLine,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(__version__, prog_name="mlx-mtp")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Exact multi-token-prediction decoding on MLX: same text, faster."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help(), err=True)
        sys.exit(2)
    check_command(ctx.invoked_subcommand)


COMMANDS = [generate, chat, cache_prompt, convert, draft_vocab, bench, doctor, inspect]
COMMANDS += [models, pull, serve, tune_heads, verify_lossless]
for command in COMMANDS:
    main.add_command(command)
