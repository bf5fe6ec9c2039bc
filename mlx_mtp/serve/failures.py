"""Contain failures of work that no request waits for."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ..machine.errors import with_type

log = logging.getLogger("mlx_mtp.serve")


@contextmanager
def dropped(what: str, undo: Callable[[], None] | None = None) -> Iterator[None]:
    """Drop a block of work that raises: write one line to the log, after `undo` has run.

    what: begins that line. Panics of libraries in Rust are no `Exception`, so everything is caught, and the block
    must contain neither `await` nor `yield`.
    """
    try:
        yield
    except BaseException as e:
        with suppress(BaseException):
            if undo:
                undo()
        with suppress(BaseException):  # the log can fail, too
            log.warning("%s", printable(f"{what}: {with_type(e)}"))


def printable(line: str) -> str:
    """Escape a line for the log if it contains what a terminal does not show as text: parts of it are a client's."""
    return line if line.isprintable() else ascii(line)
