"""Run MLX's work of all threads in turn, on streams that belong to none of them.

MLX's default streams are each thread's own, and an array that is not computed yet can be computed only where the
stream of its making is. Work here goes to one stream per device, of `mx.new_thread_unsafe_stream`: every thread finds
it (its encoder is in a map that all share, on Metal too), and nothing in MLX guards it, hence the turns.
On Metal this has been reasoned out of MLX's source and not been tried.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from typing import Any, TypeVar

import mlx.core as mx

T = TypeVar("T")
LAST_TURN, LAST_LINE = 10, 0.2  # seconds that the end of the process gives daemon threads to end a turn, to line up

_line, _turn = threading.RLock(), threading.RLock()  # a finalizer may come in between
_thread, _numbers = threading.local(), count()
_users: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # threads that have had a turn, but for the main one


@contextmanager
def in_turn() -> Iterator[None]:
    """Wait for a turn, and let what is computed in it be of no thread; a turn within a turn is the same one.

    Threads that wait stand in a line, and one that has had its turn has to join it again.
    """
    if getattr(_thread, "in_turn", False):
        yield
        return
    with _line:
        _turn.acquire()
    _thread.in_turn = True
    try:
        streams, maker = _shared_streams()
        _clean_up_behind(threading.current_thread(), maker if len(streams) > 1 else None)
        before = [mx.default_stream(stream.device) for stream in streams]
        try:
            for stream in streams:
                mx.set_default_stream(stream)
            yield
        finally:
            for stream in before:
                mx.set_default_stream(stream)
    finally:
        _thread.in_turn = False
        _turn.release()


def in_turns(steps: Generator[T, None, None]) -> Generator[T, None, None]:
    """Yield what `steps` does, each item made in a turn of its own, whichever thread asks for it."""
    end: Any = object()
    try:
        while True:
            with in_turn():
                item = next(steps, end)
            if item is end:
                return
            yield item
    finally:
        with in_turn():
            steps.close()


def thread_number() -> int:
    """Number this thread, as no other has been."""
    if not hasattr(_thread, "number"):
        _thread.number = next(_numbers)
    return _thread.number


@cache
def _shared_streams() -> tuple[list[mx.Stream], int | None]:
    """Make a stream for each device; return also which thread did, and is MLX's main one if none was before."""
    devices = [device for device in (mx.cpu, mx.gpu) if mx.is_available(device)]
    streams = [mx.new_thread_unsafe_stream(device) for device in devices]
    mx.synchronize(streams[0])
    return streams, threading.get_ident()


def _clean_up_behind(thread: threading.Thread, but: int | None) -> None:
    """Have MLX drop what it compiled in a thread when that ends: its own destructor takes Python's lock for it, which
    aborts a process that is about to end.

    but: the thread that keeps it, MLX's main one, for which `mx.clear_streams` drops the GPU's shared streams, too.
    """
    if not hasattr(_thread, "cleanup") and thread is not threading.main_thread() and thread.ident != but:
        _thread.cleanup = _Cleanup()
        _users.add(thread)


@atexit.register
def _keep_last_turn() -> None:
    """Take the turn for good: a daemon thread that Python's end stops while it runs, and not in the line, aborts the
    process by MLX's destructors."""
    _turn.acquire(timeout=LAST_TURN)
    if any(thread.is_alive() for thread in _users):
        time.sleep(LAST_LINE)


class _Cleanup:
    """Clears what MLX keeps of a thread, when the thread's own variables go."""

    def __del__(self, clear: Any = mx.clear_streams) -> None:
        clear()
