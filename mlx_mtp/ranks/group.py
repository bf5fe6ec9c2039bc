"""Talk to the other ranks: hear what rank 0 decides, and check that all ranks hold the same."""

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
    """The processes that hold a model together, of which this one is number `rank` of `size`.

    Its methods wait for all ranks, each of which has to call the same ones in the same order.
    stopping: rank 0 sets it, from a signal handler or another thread, to end the text under way on all ranks.
    """

    stopping = False

    def __init__(self, group: Any):
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def gather(self, numbers: list[int]) -> list[list[int]]:
        """Return every rank's numbers, int32 and as many from each, in the order of ranks."""
        with in_turn():
            found: Any = mx.distributed.all_gather(mx.array([numbers], mx.int32), group=self.group).tolist()
        return found

    def broadcast(self, value: Any = None) -> Any:
        """Return rank 0's `value`, which JSON can write; what the others pass is not looked at."""
        return self.gather_values(value if self.rank == 0 else None)[0]

    def gather_values(self, value: Any = None) -> list[Any]:
        """Return every rank's `value`, which JSON can write, in the order of ranks."""
        text = json.dumps(value).encode()
        lengths = [length for (length,) in self.gather([len(text)])]
        with in_turn():
            sent = mx.array(list(text.ljust(max(lengths))), mx.uint8)
            received: Any = mx.distributed.all_gather(sent[None], group=self.group).tolist()
        return [json.loads(bytes(row[:length])) for row, length in zip(received, lengths, strict=True)]

    def check_alike(self, what: str, value: Any) -> None:
        """Raise ValueError on every rank where `value`, whose text is compared, is not the same on all."""
        digest = hashlib.sha256(str(value).encode()).digest()[:4]
        found = self.gather([int.from_bytes(digest, signed=True)])
        odd = [str(rank) for rank, number in enumerate(found) if number != found[0]]
        if odd:
            raise ValueError(
                f"ranks: {what} differs on rank {', '.join(odd)} from rank 0's; expected the same on all"
            )

    def combined(self, digest: str) -> str:
        """Make one digest of those, of 64 hexadecimal digits, that the ranks have of their parts."""
        words = [int.from_bytes(bytes.fromhex(digest[i : i + 8]), signed=True) for i in range(0, 64, 8)]
        return hashlib.sha256(str(self.gather(words)).encode()).hexdigest()

    def file(self, file: str | Path) -> Path:
        """Name the file that this rank has in the place of `file`."""
        return rank_file(file, self.rank)


def ranks_of(group: Any) -> Ranks | None:
    """Make the ranks of a group of `mx.distributed`, and watch them from here on where that is possible; None where
    there is no group, or this process is alone in it.
    """
    if group is None or group.size() == 1:
        return None
    here = launched()
    watch.begin(group.rank(), group.size(), here and here.meeting)
    return Ranks(group)


def meet() -> Ranks | None:
    """Wait for the other ranks of this launch; None for a process of its own. Who is missing is said by the watch."""
    here = launched()
    if here is None:
        return None
    begun = watch.begin(here.rank, here.size, here.meeting)
    if begun is not None:
        begun.met.wait()  # who is missing for long ends the process
    with watched_from_outside(begun):
        return ranks_of(mx.distributed.init(strict=True))
