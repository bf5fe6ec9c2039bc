"""Predict the messages between ranks that share a model in a cycle, and their time over a link.

A layer has two sums over ranks, of its attention and of its MLP or experts; every rank gathers their parts. A cycle
has one more sum of a few numbers, in which rank 0 decides. Drafts add rows to the sums but no sums.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .ops import ModelOps
from .phases import CYCLE, PLAIN

SUMS = 2  # per layer
AGREEMENT = 24  # bytes of a rank's numbers per cycle
VALUE = 2  # bytes of a value in a sum


@dataclass(frozen=True)
class MachineLink:
    """A connection between machines. latency: seconds per small message; bandwidth: bytes per second.

    ring: a message passes through all ranks in turn. source: of the figures.
    """

    name: str
    latency: float
    bandwidth: float
    ring: bool
    source: str


LINKS = (
    MachineLink(
        "Thunderbolt 5 RDMA",
        9e-6,
        6.9e9,
        False,
        "5 to 9 us reported by users of macOS 26.2's beta; 50 to 60 Gbit/s in Apple's WWDC 2026 talk",
    ),
    MachineLink(
        "10 Gbit Ethernet",
        300e-6,
        1.25e9,
        True,
        "300 us of a message over TCP between Macs, published before RDMA; the line rate",
    ),
)


def collectives(model: ModelOps) -> int:
    """Return the number of collective operations between ranks in a cycle: two per layer, and one to agree."""
    return SUMS * sum(layer.count for layer in model.layers) + 1


def sent(model: ModelOps, rows: int, ranks: int) -> int:
    """Return the bytes that each rank sends in a cycle that verifies `rows` rows on `ranks` ranks."""
    return (ranks - 1) * ((collectives(model) - 1) * rows * model.head.k * VALUE + AGREEMENT)


def over_links(model: ModelOps, ranks: int, rows: Iterable[int]) -> list[dict[str, Any]]:
    """Return a list with a line per number of rows M (always also 1) and per link of LINKS.

    A line is a dict with phase, rows M, drafts (M - 1), ranks, collectives, bytes that a rank sends, the link's name,
    and the seconds of a cycle's messages. ranks: number of ranks. rows: the numbers M.
    """
    found = []
    for m in sorted({1, *rows}):
        count, nbytes = collectives(model), sent(model, m, ranks)
        for link in LINKS:
            seconds = count * link.latency * (ranks - 1 if link.ring else 1) + nbytes / link.bandwidth
            line = {"phase": PLAIN if m == 1 else CYCLE, "rows": m, "drafts": m - 1, "ranks": ranks}
            found.append(line | {"collectives": count, "bytes": nbytes, "link": link.name, "seconds": seconds})
    return found
