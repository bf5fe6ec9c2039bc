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
from typing import Any, TypeVar

import mlx.core as mx

T = TypeVar("T")
LAST_TURN, LAST_LINE = 10, 0.2  # seconds that the end of the process gives daemon threads to end a turn, to line up

_line, _turn = threading.RLock(), threading.RLock()  # a finalizer may come in between
_thread = threading.local()
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
        streams = _shared_streams()
        before = [mx.default_stream(stream.device) for stream in streams]
        for stream in streams:
            mx.set_default_stream(stream)
        try:
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


def _shared_streams() -> list[mx.Stream]:
    """Return the streams, one per device, and see to it that this thread leaves nothing behind that needs Python.

    MLX's main thread keeps what it has: `mx.clear_streams` would take a GPU's shared stream from all others.
    """
    streams, maker = _made()
    thread = threading.current_thread()
    keeps = thread is threading.main_thread() or (len(streams) > 1 and thread.ident == maker)
    if not (keeps or hasattr(_thread, "cleanup")):
        _thread.cleanup = _Cleanup()
        _users.add(thread)
    return streams


@cache
def _made() -> tuple[list[mx.Stream], int | None]:
    """Make the streams; return also which thread did, and is MLX's main one if none was before."""
    streams = [mx.new_thread_unsafe_stream(device) for device in (mx.cpu, mx.gpu) if mx.is_available(device)]
    mx.synchronize(streams[0])
    return streams, threading.get_ident()


class _Cleanup:
    """Drops what MLX has compiled in a thread when the thread's own variables go.

    MLX's destructor of it, which comes later, takes Python's lock, and aborts a process that is about to end.
    """

    def __del__(self, clear: Any = mx.clear_streams) -> None:
        clear()


@atexit.register
def _keep_last_turn() -> None:
    """Take the turn for good: a daemon thread that is stopped while it runs, and not in the line, aborts as above."""
    _turn.acquire(timeout=LAST_TURN)
    if any(thread.is_alive() for thread in _users):
        time.sleep(LAST_LINE)
