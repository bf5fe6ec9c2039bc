"""A directory or file that is there when it is finished, and not before.

It grows under another name beside it. Whoever is stopped, by Ctrl-C, a full disk or SIGKILL, leaves nothing under the
right name; what SIGKILL leaves under the other one, the next run replaces.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rich.filesize import decimal

SUFFIX = ".partial"
NOTE = "unfinished.txt"
TEXT = "What `mlx-mtp convert` has not finished; delete it, or run the same command again.\n"


class Taken(ValueError):
    """Another run's, to be left alone."""


def check_free(path: Path, needed: int) -> None:
    """Raise ValueError where the disk that `path` will be on has less than `needed` bytes free."""
    above = next(folder for folder in path.parents if folder.exists())
    free = shutil.disk_usage(above).free
    if free < needed:
        raise ValueError(f"{path}: needs {decimal(needed)}, and {decimal(free)} are free there")


def check_new(path: Path) -> None:
    """Raise ValueError where `path` is taken: by a file, a directory with anything in it, or a mounted disk."""
    if path.is_dir():
        if any(path.iterdir()):
            raise ValueError(f"{path}: already there and not empty; name a new directory, or delete it")
        if path.is_mount():
            raise ValueError(f"{path}: a mounted disk; name a new directory on it")
    elif path.exists() or path.is_symlink():
        raise ValueError(f"{path}: already there and no directory; name a new directory, or delete it")


@contextlib.contextmanager
def directory(path: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `path` when the block ends, and is deleted when it raises."""
    work = path.with_name(path.name + SUFFIX)
    _clear(work)
    try:
        work.mkdir(parents=True, exist_ok=True)
        (work / NOTE).write_text(TEXT)
        with _locked(work, path):
            yield work
            (work / NOTE).unlink()
            work.rename(path)
    except Taken:
        raise
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


@contextlib.contextmanager
def file(path: Path) -> Iterator[Path]:
    """The same for a file."""
    work = path.with_name(path.name + SUFFIX)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield work
        work.rename(path)
    except BaseException:
        work.unlink(missing_ok=True)
        raise


def _clear(work: Path) -> None:
    """Delete what an earlier run left; ValueError where somebody else's is in the way."""
    if work.exists() and any(work.iterdir()):
        if not (work / NOTE).exists():
            raise ValueError(f"{work}: in the way, and not left by an earlier run; delete it")
        with _locked(work, work):
            shutil.rmtree(work)


@contextlib.contextmanager
def _locked(folder: Path, path: Path) -> Iterator[None]:
    """Hold the directory's lock; Taken where another process does."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Taken(f"{path}: another run is writing it") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)
