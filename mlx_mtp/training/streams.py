"""Streams of a CPU's cores: MLX runs a stream's operations, but for those of a BLAS, on one thread."""

import os
import threading
from contextlib import AbstractContextManager, nullcontext

import mlx.core as mx

STREAMS = 2
WIDTH = "MLX_BFS_MAX_WIDTH"  # MLX's variable: the number of nodes of a graph that it orders breadth first


def interleave_streams() -> None:
    """Set MLX's variable WIDTH, so that streams run at the same time, if the default device is a CPU.

    By default MLX orders nearly all of one stream's operations before those of the other, and submits few at a time:
    the streams then run one after the other, and a step takes twice as long. A value that is set already stays. No
    effect after the process' first evaluation, when MLX reads the variable.
    """
    if mx.default_device() == mx.cpu:
        os.environ.setdefault(WIDTH, "1000")


class _Own(threading.local):
    """The streams of a thread, which no other thread can use."""

    def __init__(self):
        self.streams = [mx.new_stream(mx.cpu) for _ in range(STREAMS)]


_own = _Own()


def streams(count: int = STREAMS) -> list[AbstractContextManager]:
    """Return contexts in which operations run at the same time: at most `count` on a CPU, else one."""
    if mx.default_device() != mx.cpu:
        return [nullcontext()]
    return [mx.stream(stream) for stream in _own.streams[:count]]
