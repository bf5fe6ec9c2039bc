"""Exchange values between ranks: broadcast rank 0's decisions, and check that all ranks have the same data."""

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..machine.stream import in_turn
from . import watch
from .connecting import watched_from_outside
from .launch import launched, rank_file


class Ranks:
    """The processes that share a model; this one has index `rank` of `size`.

    Methods wait for all ranks, `file` excepted: each must call the same methods in the same order.
    stopping: rank 0 sets it, from a signal handler or another thread, to end the current sequence on all ranks.
    """

    stopping = False

    def __init__(self, group: Any):
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """Return the numbers of every rank, in rank order. numbers: int32 values, on every rank the same count."""
        with in_turn():
            gathered: Any = mx.distributed.all_gather(mx.array([numbers], mx.int32), group=self.group).tolist()
        return gathered

    def broadcast(self, value: Any = None) -> Any:
        """Return rank 0's `value`, a JSON value; those of other ranks are ignored."""
        return self.gather_values(value if self.rank == 0 else None)[0]

    def gather_values(self, value: Any = None) -> list[Any]:
        """Return the `value` of every rank, a JSON value, in rank order."""
        text = json.dumps(value).encode()
        lengths = [length for (length,) in self.gather([len(text)])]
        with in_turn():
            sent = mx.array(list(text.ljust(max(lengths))), mx.uint8)
            received: Any = mx.distributed.all_gather(sent[None], group=self.group).tolist()
        return [json.loads(bytes(row[:length])) for row, length in zip(received, lengths, strict=True)]

    def broadcast_array(self, array: mx.array | None, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """Return rank 0's `array`, evaluated, with the same bits on every rank; arrays of other ranks are ignored.

        shape, dtype: of the array, the same on every rank; AssertionError on rank 0 if its array has others.
        """
        with in_turn():
            own = array if array is not None and self.rank == 0 else mx.zeros(shape, dtype)
            assert (own.shape, own.dtype) == (shape, dtype)
            sent = mx.view(mx.contiguous(own), mx.uint8)  # sums of bytes are exact: the others send zeros
            received = mx.view(mx.distributed.all_sum(sent, group=self.group), dtype)
            mx.eval(received)
        return received

    def check_alike(self, what: str, value: Any) -> None:
        """Raise ValueError on every rank unless `str(value)` is the same on all.

        what: the name of the value, for the message.
        """
        digest = hashlib.sha256(str(value).encode()).digest()[:4]
        found = self.gather([int.from_bytes(digest, signed=True)])
        odd = [str(rank) for rank, number in enumerate(found) if number != found[0]]
        if odd:
            raise ValueError(
                f"ranks: {what} differs on rank {', '.join(odd)} from rank 0's; expected the same on all"
            )

    def combined(self, digest: str) -> str:
        """Return one digest of all ranks' digests, each of 64 hexadecimal digits."""
        words = [int.from_bytes(bytes.fromhex(digest[i : i + 8]), signed=True) for i in range(0, 64, 8)]
        return hashlib.sha256(str(self.gather(words)).encode()).hexdigest()

    def file(self, file: str | Path) -> Path:
        """Return the file that this rank uses for `file`: rank 0 the file itself, rank n "<file>.rank<n>"."""
        return rank_file(file, self.rank)


def ranks_of(group: Any) -> Ranks | None:
    """Return the ranks of a group of `mx.distributed`; None for no group or a group of one.

    Also start the watch, which ends this process if another rank ends or hangs. Without an address of rank 0, as
    with mpirun, there is no watch.
    """
    if group is None or group.size() == 1:
        return None
    launch = launched()
    watch.begin(group.rank(), group.size(), launch and launch.meeting)
    return Ranks(group)


def meet() -> Ranks | None:
    """Wait for all ranks of this launch and return them; None for a single process, or an unknown number of ranks.

    If a rank does not start, the watch ends this process with a message that names it. As with mpirun, there may be
    no watch; see `ranks_of`.
    """
    launch = launched()
    if launch is None:
        return None
    running = watch.begin(launch.rank, launch.size, launch.meeting)
    if running is not None:
        running.met.wait()
    with watched_from_outside(running):
        return ranks_of(mx.distributed.init(strict=True))
