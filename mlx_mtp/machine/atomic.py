"""Write files and directories that other processes see complete or not at all.

A long write goes to a temporary name in the same directory, which is locked for one run at a time. After Ctrl-C, a
full disk or SIGKILL nothing has the final name; the next run replaces a temporary file that SIGKILL left.
"""

import contextlib
import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

from rich.filesize import decimal

from .errors import naming

SUFFIX = ".partial"
NOTE = "unfinished.txt"
TEXT = "What `mlx-mtp convert` has not finished; delete it, or run the same command again.\n"


def write_whole(file: str | Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a small file, in UTF-8 if `content` is a str, and create its directory; a link's target is replaced.

    mode: permissions of the new file; those that the umask excludes are removed.

    Others see the file before or after the write, and if it fails (OSError), an earlier file is unchanged. A pipe or
    a terminal cannot be replaced and is written directly.
    """
    path = Path(file).resolve()
    content = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        with naming(path):
            path.write_bytes(content)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.part")
    try:
        with naming(path):
            part.touch(mode)
            part.write_bytes(content)
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_free(path: Path, needed: int) -> None:
    """Raise ValueError if the disk that will hold `path` has less than `needed` bytes free.

    Temporary files that an earlier run left for `path` count as free because they are replaced.
    """
    above, left = next(folder for folder in path.parents if folder.exists()), _work(path)
    old = [left, *left.iterdir()] if (left / NOTE).exists() else [left]
    free = shutil.disk_usage(above).free + sum(file.stat().st_size for file in old if file.is_file())
    if free < needed:
        found = f"needs {decimal(needed)}, and {decimal(free)} are free there"
        raise ValueError(f"{path}: {found}; delete files, or name another disk")


def check_new(path: Path) -> None:
    """Raise ValueError unless nothing exists at `path`, or an empty directory that can be replaced.

    A mount point and the working directory cannot. path: resolved.
    """
    if path.is_dir():
        if any(path.iterdir()):
            raise ValueError(f"mlx_path={path}: already there and not empty; name a new directory, or delete it")
        if path.is_mount():
            raise ValueError(f"mlx_path={path}: a mounted disk; name a new directory on it")
        if path == Path.cwd():
            raise ValueError(f"mlx_path={path}: the working directory; name a new directory in it")
    elif path.exists() or path.is_symlink():
        raise ValueError(f"mlx_path={path}: already there and no directory; name a new directory, or delete it")


@contextlib.contextmanager
def directory(path: Path) -> Iterator[Path]:
    """Yield a directory to fill; rename it to `path` when the block ends, delete it if the block raises.

    The directory is `path` with the suffix ".partial"; what an earlier run left in it is deleted. ValueError if
    another run is writing it, or it has files that no earlier run left. OSError, when the block ends, if `path` is
    then anything but an empty directory.
    """
    work = _work(path)
    try:
        work.mkdir(parents=True, exist_ok=True)
        with naming(path), _locked(work, path, os.O_RDONLY):
            _empty(work)
            try:
                (work / NOTE).write_text(TEXT)
                yield work
                (work / NOTE).unlink()
                work.rename(path)
            except BaseException:
                shutil.rmtree(work, ignore_errors=True)
                raise
    except KeyboardInterrupt:
        with contextlib.suppress(OSError):
            work.rmdir()  # fails, as it should, if files have been written
        raise


@contextlib.contextmanager
def file(path: Path) -> Iterator[Path]:
    """Yield a file name to write; rename the file to `path` when the block ends, delete it if the block raises.

    A file at `path` is replaced. The name yielded exists already, empty or as an earlier run left it. ValueError if
    another run is writing it.
    """
    work = _work(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path), _locked(work, path, os.O_RDWR | os.O_CREAT):
        try:
            yield work
            work.rename(path)
        except BaseException:
            work.unlink(missing_ok=True)
            raise


def is_abandoned(work: Path) -> bool:
    """Return whether `work`, a temporary file that `file` yielded, belongs to no run: no process holds its lock.

    False also if that is unknown, as for a directory, a missing or read-only file, or a file system without locks.
    """
    try:
        with work.open("r+b") as f:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _work(path: Path) -> Path:
    return path.with_name(path.name + SUFFIX)


def _empty(work: Path) -> None:
    """Delete the files in a directory, NOTE last; ValueError if it has files, but not NOTE."""
    if any(work.iterdir()) and not (work / NOTE).exists():
        raise ValueError(f"{work}: in the way, and not left by an earlier run; delete it")
    for left in sorted(work.iterdir(), key=lambda left: left.name == NOTE):  # the note, which marks it as ours, last
        left.unlink()


@contextlib.contextmanager
def _locked(work: Path, path: Path, flags: int) -> Iterator[None]:
    """Hold the lock on `work`, which becomes `path`; ValueError, about `path`, if another process holds it.

    flags: of `os.open`. A file system without locks has none, and the block runs.
    """
    handle = os.open(work, flags, 0o666)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{path}: another run is writing it; wait until it has ended") from None
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(handle)
