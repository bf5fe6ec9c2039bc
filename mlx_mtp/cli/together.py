"""Run the command line as one of several ranks: rank 0 handles input and output, the others print only errors."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from ..ranks import watch
from ..ranks.launch import launched, rank_file

COMMANDS = ("generate", "chat", "serve", "cache-prompt", "bench", "verify-lossless")
SAME = "ranks"  # start of errors that all ranks raise


@contextmanager
def as_rank() -> Iterator[None]:
    """Run a block as one of several ranks, of which those above 0 print only errors.

    At the end of the block rank 0 reports its exit code to the other ranks, and each of these reports its own to
    rank 0; a code other than 0 ends all ranks (see `watch.leave`). In a single process nothing changes.
    """
    here = launched()
    if here is None:
        yield
        return
    if here.rank:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a Python handler would wait for collectives
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
    code = 1
    try:
        yield
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
        raise
    finally:
        watch.leave(code)


def error_line(message: str, code: int) -> str | None:
    """Return the error line of this rank; None if rank 0 prints it: code 2, or a message that starts with SAME."""
    here = launched()
    if here is None or here.rank == 0:
        return f"error: {message}"
    return None if code == 2 or message.startswith(SAME) else f"error: rank {here.rank}: {message}"


def check_command(name: str | None, allowed: tuple[str, ...] = COMMANDS) -> None:
    """Raise UsageError if this is one of several ranks, and a command is not among those `allowed` for them."""
    if launched() and name not in allowed:
        raise click.UsageError(f"{name} is for a single process; on several ranks use {', '.join(allowed)}")


def check_flags(**given: Any) -> None:
    """Raise UsageError for a flag with a value if this is one of several ranks, which do not support it."""
    if launched() and (name := next((name for name, value in given.items() if value), None)):
        raise click.UsageError(f"--{name.replace('_', '-')}: not supported on several ranks; leave it out")


def check_prompt(value: str) -> None:
    """Raise UsageError on several ranks if the prompt is '-': the launcher does not forward the end of stdin."""
    if launched() and value == "-":
        raise click.UsageError("--prompt -: standard input has no end on several ranks; give the text itself")


def group() -> Any:
    """Join the other ranks and return their MLX group, None for a single process; Ctrl-C then only affects rank 0."""
    if launched() is None:
        return None
    from ..ranks.group import meet

    ranks = meet()
    if ranks and ranks.rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return ranks and ranks.group


def own_file(file: Path) -> Path:
    """Return this rank's file for one named on the command line: rank n > 0 has "<file>.rank<n>"."""
    here = launched()
    return rank_file(file, here.rank) if here else file


def follows() -> bool:
    """Return whether this is a rank above 0: it computes what rank 0 does, reads no input, prints only errors."""
    here = launched()
    return here is not None and here.rank > 0
