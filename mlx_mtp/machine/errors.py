"""Write errors for users: one line, the file they are about, and what to install."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG  # a disk, a quota, the limit of a file's size


def first_line(e: BaseException) -> str:
    """Return the first line of an exception's text, or its type's name where it has none."""
    return str(e).strip().partition("\n")[0] or type(e).__name__


def with_type(e: BaseException) -> str:
    """Return an exception's type and the first line of its text, if any: "KeyError: 'name'"."""
    line, kind = first_line(e), type(e).__name__
    return kind if line == kind else f"{kind}: {line}"


def refusal(e: BaseException) -> str:
    """Return an exception's type and, of a compiler's text, the first error, else the first line."""
    errors = [line for line in str(e).splitlines() if "error:" in line]
    return f"{type(e).__name__}: {errors[0].strip()}" if errors else with_type(e)


def install(extra: str) -> str:
    """Return the instruction that installs one of pyproject.toml's extras, in the form that works from a clone."""
    return f"pip install -e '.[{extra}]' in the clone of mlx_mtp"


@contextmanager
def one_line(what: str, kinds: tuple[type[Exception], ...] = (Exception,), *, keep: bool = False) -> Iterator[None]:
    """Raise what a block raises, of these kinds, as a ValueError in one line: `what`, and why in parentheses.

    keep: a ValueError that is one line already stays as it is.
    """
    try:
        yield
    except kinds as e:
        if keep and isinstance(e, ValueError) and "\n" not in str(e):
            raise
        raise ValueError(f"{what} ({first_line(e)})") from e


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Add the file's name to the error of a full disk, which has none."""
    try:
        yield
    except OSError as e:
        if e.errno in FULL:
            e.filename = e.filename or str(path)
        raise
