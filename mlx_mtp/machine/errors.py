"""Format errors for users: one line with the file and, if an extra is missing, the command that installs it."""

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from os.path import expanduser
from pathlib import Path
from tempfile import gettempdir

LONGEST = 500  # characters of a message of several lines
QUOTED = re.compile(r"(['\"`])~?/(?:[^'\"`]*/)?")  # the directories of a path in quotes, which may contain spaces
DIRECTORIES = re.compile(r"(?<![\w.:/<])~?/(?:[^\s'\"`,;:()<>/]+/)*(?=\w)")
BELOW = r"(?:[^'\"`:;,()/\n]*[^\s'\"`:;,()/]/)*"  # directories below a known one
FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG  # disk full, quota exceeded, file too large


def first_line(e: BaseException) -> str:
    """Return the first line of an exception's message, or the name of its type if it has none.

    Of a message whose first line ends with a colon, all lines are joined, up to LONGEST characters.
    """
    first, _, rest = str(e).strip().partition("\n")
    if first.rstrip().endswith(":"):
        first = " ".join(f"{first} {rest}".split())[:LONGEST]
    return first or type(e).__name__


def with_type(e: BaseException) -> str:
    """Return an exception's type and the first line of its message, if any: "KeyError: 'name'"."""
    line, kind = first_line(e), type(e).__name__
    return kind if line == kind else f"{kind}: {line}"


def without_directories(text: str, *known: Path) -> str:
    """Return a message in which each path on this machine is only its last name.

    known: directories that the message may contain; without quotes their names may contain spaces only if they, or
    the home, working or temporary directory, are known.
    """
    text = QUOTED.sub(r"\1", text)
    for directory in (*known, Path(expanduser("~")), Path.cwd(), Path(gettempdir())):
        if directory not in (Path("/"), Path(".")):
            begins = "" if directory.is_absolute() else r"(?<![\w./-])"  # not the end of another path
            text = re.sub(f"{begins}{re.escape(str(directory))}/{BELOW}", "", text)
    return DIRECTORIES.sub("", text)


def refusal(e: BaseException) -> str:
    """Return an exception's type and the first line that contains "error:", else the first line of its message."""
    errors = [line for line in str(e).splitlines() if "error:" in line]
    return f"{type(e).__name__}: {errors[0].strip()}" if errors else with_type(e)


def install(extra: str) -> str:
    """Return the command that installs one of pyproject.toml's extras from a clone."""
    return f"pip install -e '.[{extra}]' in the clone of mlx_mtp"


@contextmanager
def one_line(what: str, kinds: tuple[type[Exception], ...] = (Exception,), *, keep: bool = False) -> Iterator[None]:
    """Convert exceptions of these kinds to a one-line ValueError: `what`, and the cause in parentheses.

    keep: a ValueError that is already one line passes unchanged. Exceptions of other kinds always pass.
    """
    try:
        yield
    except kinds as e:
        if keep and isinstance(e, ValueError) and "\n" not in str(e):
            raise
        raise ValueError(f"{what} ({first_line(e)})") from e


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Return a context that adds a file's name to an OSError that lacks one and is in FULL; all errors pass on."""
    try:
        yield
    except OSError as e:
        if e.errno in FULL:
            e.filename = e.filename or str(path)
        raise
