"""Read and write prefix cache files: each is a safetensors file with the chunks of one sequence.

Each chunk has a digest, so that a reader reads and verifies only the chunks that it uses.
"""

import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from ..cache.file import safetensors_header
from ..cache.layer_cache import Parts
from ..cache.pieces import Checkpoint, buffers, check_piece, has_rows, packed_checkpoint, packed_rows
from ..cache.prompt_cache import PromptCache
from ..checkpoint.convert_writer import DTYPES, header
from ..machine.errors import one_line

FORMAT = "prefix 1"  # a string, because the format of a prompt cache file is a number
BLANK = "0" * 64  # placeholder of a digest
PIECE = 1 << 22  # bytes per write: a request waits for at most one
TYPES = {name: dtype for dtype, name in DTYPES.items()}


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


@dataclass(frozen=True)
class PrefixHeader:
    """The header of a prefix file.

    identity: `PrefixTree.identity` of the tree that wrote it. tokens: those of the sequence.
    ends: end positions of its chunks. resumable: those with a checkpoint, where a sequence can continue.
    """

    identity: str = ""
    tokens: Sequence[int] = ()
    ends: Sequence[int] = ()
    resumable: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.tokens)


FOREIGN = PrefixHeader()  # stands for a file of another format


def write_chunks(file: Path, path: list[Chunk], identity: str) -> Iterator[int]:
    """Write a path's chunks to a file, about PIECE bytes per step; yield the number of bytes written so far.

    path: the chunks of one sequence, by position. identity: as in `PrefixHeader`. The file is complete only when the
    iterator has ended, which writes the digests.
    """
    named, records = [_named(chunk) for chunk in path], [*map(_record, path)]
    state = {"format": FORMAT, "identity": identity}
    ends = itertools.accumulate(len(chunk.tokens) for chunk in path)
    digests = [_digest(state, *facts) for facts in zip(ends, records, named, strict=True)]
    begin = _begin(named, records, [BLANK] * len(path), state)
    written = flushed = len(begin)
    with file.open("wb") as f:
        f.write(begin)
        for digest, arrays in zip(digests, named, strict=True):
            for array in arrays.values():
                for piece in _pieces(array):
                    digest.update(piece)
                    f.write(piece)
                    written += len(piece)
                    if written - flushed >= PIECE:
                        _flush(f)  # so that the last flush is short
                        flushed = written
                        yield written
        f.seek(0)
        f.write(_begin(named, records, [digest.hexdigest() for digest in digests], state))
        _flush(f)


def bytes_needed(path: list[Chunk]) -> int:
    """Return the size of the file that `write_chunks` writes for a path."""
    named, records = [_named(chunk) for chunk in path], [*map(_record, path)]
    begin = _begin(named, records, [BLANK] * len(path), {"format": FORMAT, "identity": BLANK})
    return len(begin) + sum(chunk.nbytes for chunk in path)


def read_stored(file: Path) -> PrefixHeader:
    """Return a file's header, FOREIGN if its format is not FORMAT. Raises ValueError if damaged, and OSError."""
    with file.open("rb") as f:
        return ChunkReader(f, file).stored


class ChunkReader:
    """Reads single chunks of an open prefix file and verifies their digests. stored: the file's header."""

    def __init__(self, f: BinaryIO, file: Path):
        """Read the header; raises ValueError if it is damaged. `stored` is FOREIGN if its format is not FORMAT."""
        self._f, self._file, self.stored = f, file, FOREIGN
        with _damaged(file):
            entries = json.loads(safetensors_header(f))
            self._state = json.loads(entries.pop("__metadata__")["mlx_mtp"])
            self._base = f.tell()
            if self._state.get("format") == FORMAT:
                self._read(entries)

    def _read(self, entries: dict[str, Any]) -> None:
        """Group the header's entries by chunk, and set `stored`; ValueError if the file's size is another one."""
        self._records = self._state.pop("chunks")
        self._entries: list[dict[str, Any]] = [{} for _ in self._records]
        for name, entry in entries.items():
            index, _, rest = name.partition(".")
            self._entries[int(index)][rest] = entry
        if self._base + max(e["data_offsets"][1] for e in entries.values()) != os.fstat(self._f.fileno()).st_size:
            raise ValueError("its size does not match its header")
        tokens = [token for record in self._records for token in record["tokens"]]
        ends = [*itertools.accumulate(len(record["tokens"]) for record in self._records)]
        resumable = frozenset(end for end, record in zip(ends, self._records, strict=True) if record["moment"])
        self.stored = PrefixHeader(self._state["identity"], tokens, ends, resumable)

    def primed(self, index: int) -> int:
        """Return the number of positions that the MTP heads have read at the end of the chunk with this index."""
        with _damaged(self._file):
            return self._records[index]["primed"]

    def bytes_of(self, index: int) -> int:
        """Return the number of bytes of the arrays in the chunk with this index."""
        with _damaged(self._file):
            return sum(e["data_offsets"][1] - e["data_offsets"][0] for e in self._entries[index].values())

    def chunk(self, index: int, like: PromptCache, primed: int) -> Chunk:
        """Return the chunk with this index, without a parent; ValueError if it is damaged or its arrays do not fit.

        like: a cache with rows, whose layout, shapes and dtypes the arrays must have. primed: positions that the MTP
        heads had read before this chunk.
        """
        with _damaged(self._file):
            record, end = {**self._records[index]}, self.stored.ends[index]
            expected = record.pop("digest")
            arrays, contents = {}, []
            for name, entry in self._entries[index].items():
                first, last = entry["data_offsets"]
                self._f.seek(self._base + first)
                contents.append(self._f.read(last - first))
                arrays[name] = _array(contents[-1], TYPES[entry["dtype"]], entry["shape"])
            digest = _digest(self._state, end, record, arrays)
            for content in contents:
                digest.update(content)
            if digest.hexdigest() != expected:
                raise ValueError("its content does not match its digest")
            chunk = _rebuilt(record, end, arrays, like)
            check_piece(chunk.rows, chunk.checkpoint, like, len(chunk.tokens), chunk.primed - primed)
            chunk.rows = packed_rows(chunk.rows)
            chunk.checkpoint = chunk.checkpoint and packed_checkpoint(chunk.checkpoint)
            mx.eval(chunk.rows, chunk.checkpoint.arrays if chunk.checkpoint else [])
            return chunk


def _named(chunk: Chunk) -> dict[str, mx.array]:
    """Return a dict of a chunk's arrays by "kind.index.part"; index: of the cache, or of the array of this kind."""
    kinds: dict[str, dict[int, Parts]] = {"rows": dict(enumerate(chunk.rows))}
    if chunk.checkpoint:
        kinds["kept"] = {i: (row,) for i, row in enumerate(chunk.checkpoint.kept)}
        kinds["backlog"] = {i: (rows,) for i, rows in enumerate(chunk.checkpoint.backlog)}
        kinds["whole"] = chunk.checkpoint.whole
    return {
        f"{kind}.{i}.{j}": part
        for kind, groups in kinds.items()
        for i, parts in groups.items()
        for j, part in enumerate(parts)
    }


def _record(chunk: Chunk) -> dict[str, Any]:
    """Return the header record of a chunk, without its digest: tokens, `primed`, and numbers of the checkpoint."""
    checkpoint = chunk.checkpoint and {"primed": chunk.checkpoint.primed, "starts": chunk.checkpoint.starts}
    return {"tokens": chunk.tokens, "primed": chunk.primed, "moment": checkpoint}


def _rebuilt(record: dict[str, Any], end: int, arrays: dict[str, mx.array], like: PromptCache) -> Chunk:
    """Return the chunk for a record and arrays, the inverse of `_record` and `_named`.

    end: the position after its last token. like: as in `ChunkReader.chunk`.
    """
    groups: dict[str, dict[int, Parts]] = {"rows": {}, "kept": {}, "backlog": {}, "whole": {}}
    for name, array in arrays.items():
        kind, i, _ = name.split(".")
        groups[kind][int(i)] = (*groups[kind].get(int(i), ()), array)
    rows = [groups["rows"].get(i, ()) for i in range(len(like.caches))]
    checkpoint = None
    if at := record["moment"]:
        kept, backlog = ([part for (part,) in groups[kind].values()] for kind in ("kept", "backlog"))
        whole = {i: groups["whole"].get(i, ()) for i, c in enumerate(like.caches) if not has_rows(c)}
        checkpoint = Checkpoint(end, at["primed"], kept, backlog, whole, at["starts"])
    return Chunk(tuple(record["tokens"]), rows=rows, checkpoint=checkpoint, primed=record["primed"])


def _begin(named: list, records: list, digests: list[str], state: dict[str, Any]) -> bytes:
    """Return a file's header as bytes; their number does not depend on the digests.

    named, records, digests: of each chunk, in the order of the path. state: further entries of the metadata.
    """
    chunks = [{**record, "digest": digest} for record, digest in zip(records, digests, strict=True)]
    tensors = {f"{i}.{name}": array for i, arrays in enumerate(named) for name, array in arrays.items()}
    return header(tensors, {"mlx_mtp": json.dumps({**state, "chunks": chunks}, separators=(",", ":"))})


def _digest(state: dict[str, Any], end: int, record: dict[str, Any], arrays: dict[str, mx.array]) -> Any:
    """Return the hash object of a chunk that ends at position `end`, still without the bytes of its arrays.

    state: format and identity of the file. record: from `_record`. arrays: from `_named`.
    """
    kinds = [(name, DTYPES[array.dtype], array.shape) for name, array in arrays.items()]
    return hashlib.sha256(json.dumps([state, end, record, kinds]).encode())


def _pieces(array: mx.array) -> Iterator[memoryview]:
    """Yield the bytes of an array, PIECE at a time."""
    if array.nbytes:
        content = memoryview(mx.contiguous(array).reshape(-1).view(mx.uint8))  # type: ignore[arg-type]
        for begin in range(0, array.nbytes, PIECE):
            yield content[begin : begin + PIECE]


def _array(content: bytes, dtype: mx.Dtype, shape: list[int]) -> mx.array:
    if len(content) != math.prod(shape) * dtype.size:
        raise ValueError("truncated")
    if not content:
        return mx.zeros(shape, dtype)
    return mx.array(np.frombuffer(content, np.uint8)).view(dtype).reshape(shape)


def _flush(f: BinaryIO) -> None:
    f.flush()
    os.fsync(f.fileno())


def _damaged(file: Path) -> Any:
    """Return a context that converts the errors of reading a damaged file to a ValueError with its name."""
    kinds = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
    return one_line(f"{file}: damaged", kinds)
