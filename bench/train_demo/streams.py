"""Streams of a CPU's cores: MLX runs a stream's operations, but for those of a BLAS, on one thread.

They run at the same time only with the environment variable MLX_BFS_MAX_WIDTH: by default MLX orders nearly all
operations of one stream before those of the other.
"""

import mlx.core as mx

STREAMS = 2


def streams(count: int = STREAMS) -> list[mx.StreamContext]:
    """Return contexts in which operations run at the same time: at most `count`, and at most STREAMS."""
    return [mx.stream(mx.new_stream(mx.cpu)) for _ in range(min(count, STREAMS))]
