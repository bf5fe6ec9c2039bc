"""Define the chunks of a prefix tree."""

from dataclasses import dataclass, field

import mlx.core as mx

from ..cache.layer_cache import Parts
from ..cache.pieces import Checkpoint, buffers


@dataclass(eq=False)
class Chunk:
    """Tokens after those of its `parent`, their cache rows, and, if sequences can continue at its end, a checkpoint.

    rows: one tuple per cache, layers before heads; () without rows. checkpoint: everything in the caches, at the
    end of the chunk, that is not a row of one position, such as recurrent states. primed: number
    of positions that the MTP heads have read. used: `time.time()` of the last use. is_tail: it ends at the end of a
    prompt, where `Chunking` has no chunk end.
    """

    tokens: tuple[int, ...] = ()
    parent: "Chunk | None" = None
    rows: list[Parts] = field(default_factory=list)
    checkpoint: Checkpoint | None = None
    primed: int = 0
    used: float = 0.0
    is_tail: bool = False
    children: dict[tuple[int, ...], "Chunk"] = field(default_factory=dict)

    @property
    def arrays(self) -> list[mx.array]:
        return [part for parts in self.rows for part in parts] + (self.checkpoint.arrays if self.checkpoint else [])

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.arrays)

    @property
    def buffers(self) -> int:
        """Number of Metal buffers: one per dtype of the rows, and one per dtype of the checkpoint."""
        rows = (part for parts in self.rows for part in parts)
        return buffers(rows) + (buffers(self.checkpoint.arrays) if self.checkpoint else 0)

    def path(self) -> list["Chunk"]:
        """List the chunks from the start of the sequence to this one, without the empty root."""
        chunks, chunk = [], self
        while chunk.parent is not None:
            chunks.append(chunk)
            chunk = chunk.parent
        return chunks[::-1]


def resumable_path(path: list[Chunk]) -> list[Chunk]:
    """Return a path up to its last chunk with a checkpoint; [] if none has one."""
    return path[: max((i for i, chunk in enumerate(path, 1) if chunk.checkpoint), default=0)]


@dataclass
class Size:
    """The bytes, buffers and chunks of one tree."""

    nbytes: int = 0
    buffers: int = 0
    chunks: int = 0
