"""Log failures of background work instead of raising them."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ..machine.errors import with_type

log = logging.getLogger("mlx_mtp.serve")
QUIET = 0.05  # seconds without a request before background work of low priority begins


@contextmanager
def dropped(failure: str, undo: Callable[[], None] | None = None) -> Iterator[None]:
    """Suppress exceptions of a block: call `undo`, then log one line that starts with `failure`.

    Panics of Rust libraries are not `Exception`s, so all exceptions are caught. The block must therefore contain
    neither `await` nor `yield`.
    """
    try:
        yield
    except BaseException as e:
        with suppress(BaseException):
            if undo:
                undo()
        with suppress(BaseException):  # logging can fail as well
            log.warning("%s", printable(f"{failure}: {with_type(e)}"))


def take_turns(turn: Callable[[], bool]) -> None:
    """Call `turn` until it returns False; an exception that nothing else caught is logged and ends one turn only."""
    goes_on = True
    while goes_on:
        try:
            goes_on = turn()
        except BaseException as e:
            with suppress(BaseException):
                log.error("a turn of the engine failed", exc_info=e)
                time.sleep(QUIET)  # a failure in each turn must not fill the log


def printable(line: str) -> str:
    """Return a log line unchanged if it is printable, else quoted and escaped: clients may choose its characters."""
    return line if line.isprintable() else ascii(line)
