"""Serialize MLX work of all threads, on streams that belong to no thread.

MLX's default streams belong to one thread, and a lazy array can be computed only in the thread of its stream. Work
here uses one stream per device from `mx.new_thread_unsafe_stream`. All threads can use it (its encoder is in a shared
map, on Metal too), but MLX does not lock it, hence the turns. For Metal this follows from MLX's source; it is
untested.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, TypeVar

import mlx.core as mx

T = TypeVar("T")
LAST_TURN, LAST_LINE = 10, 0.2  # seconds at process exit for a daemon thread to end its turn, and to reach the queue

_line, _turn = threading.RLock(), threading.RLock()  # reentrant because a finalizer may run in between
_thread = threading.local()
_users: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # threads that have had a turn, except the main one


@contextmanager
def in_turn() -> Iterator[None]:
    """Wait for this thread's turn, then compute on the shared streams; nested turns are one turn.

    Waiting threads queue, and a thread that has had its turn queues again.
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


def pass_turn() -> None:
    """Interrupt this thread's turn so that waiting threads can have theirs; return when it continues.

    Outside of a turn, nothing happens. Other threads may compute in between, so a computation that the caller has
    begun must not depend on theirs.
    """
    if not getattr(_thread, "in_turn", False):
        return
    _thread.in_turn = False
    _turn.release()
    with _line:
        _turn.acquire()
    _thread.in_turn = True


def in_turns(
    steps: Generator[T, None, None], within: Callable[[], AbstractContextManager] = nullcontext
) -> Generator[T, None, None]:
    """Yield the items of `steps`, computing each in its own turn in the thread that requests it.

    Between items the turn is free. `steps` is closed, in a turn, when it ends or raises, or this generator is closed
    after its first step. within: returns a context for each turn.
    """
    end: Any = object()
    try:
        while True:
            with in_turn(), within():
                item = next(steps, end)
            if item is end:
                return
            yield item
    finally:
        with in_turn(), within():
            steps.close()


def _shared_streams() -> list[mx.Stream]:
    """Return the shared streams, one per device, and register this thread's cleanup at its first call.

    Python's main thread and, with a GPU, MLX's main thread have none: `mx.clear_streams` in the latter would destroy
    the GPU's shared stream.
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
    """Create the streams, once per process; return (the streams, the id of the creating thread).

    That thread becomes MLX's main thread if it had none.
    """
    streams = [mx.new_thread_unsafe_stream(device) for device in (mx.cpu, mx.gpu) if mx.is_available(device)]
    mx.synchronize(streams[0])
    return streams, threading.get_ident()


class _Cleanup:
    """Calls `mx.clear_streams`, which also drops compiled functions, when the thread's local variables are deleted.

    MLX's own destructor of these functions runs later, acquires the GIL, and aborts a process that is exiting.
    """

    def __del__(self, clear: Any = mx.clear_streams) -> None:
        clear()


@atexit.register
def _keep_last_turn() -> None:
    """Hold the turn until the process ends, because a daemon thread stopped inside a turn would abort the process.

    Waits at most LAST_TURN seconds for it.
    """
    _turn.acquire(timeout=LAST_TURN)
    if any(thread.is_alive() for thread in _users):
        time.sleep(LAST_LINE)
