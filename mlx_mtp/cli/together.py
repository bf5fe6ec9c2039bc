"""Let the command line run as one of several ranks: rank 0 talks to the user, the others say nothing but errors."""

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
SAME = "ranks"  # begins errors that all ranks meet alike


@contextmanager
def as_rank() -> Iterator[None]:
    """Be quiet where rank 0 is another process; tell the others with which code this one ends."""
    here = launched()
    if here is None:
        yield
        return
    if here.rank:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler would wait for collectives
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
    """Write an error as this rank says it; None where rank 0 says the same."""
    here = launched()
    if here is None or here.rank == 0:
        return f"error: {message}"
    return None if code == 2 or message.startswith(SAME) else f"error: rank {here.rank}: {message}"


def check_command(name: str | None, allowed: tuple[str, ...] = COMMANDS) -> None:
    """Refuse a command that is for a single process."""
    if launched() and name not in allowed:
        raise click.UsageError(f"{name} is for a single process; together run {', '.join(allowed)}")


def check_flags(**given: Any) -> None:
    """Refuse flags that ranks cannot follow."""
    if launched() and (name := next((name for name, value in given.items() if value), None)):
        raise click.UsageError(f"--{name.replace('_', '-')}: not on several ranks; leave it out")


def check_prompt(value: str) -> None:
    """Refuse a prompt from standard input, whose end the launcher does not hand on."""
    if launched() and value == "-":
        raise click.UsageError("--prompt -: standard input has no end on several ranks; give the text itself")


def group() -> Any:
    """Meet the other ranks, and leave Ctrl-C to rank 0 from then on; None for a process of its own."""
    if launched() is None:
        return None
    from ..ranks.group import meet

    ranks = meet()
    if ranks and ranks.rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    return ranks and ranks.group


def own_file(file: Path) -> Path:
    """Name the file that this rank has in the place of the one that the command line names."""
    here = launched()
    return rank_file(file, here.rank) if here else file


def follows() -> bool:
    """Tell whether this is a rank that only follows: it reads no keyboard and writes no file."""
    here = launched()
    return here is not None and here.rank > 0
