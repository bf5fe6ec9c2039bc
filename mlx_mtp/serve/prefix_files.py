"""Store the chunks of a prefix tree in files, so that a restarted server can reuse them."""

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from ..cache.prompt_prefix import shared
from ..decoding.graph_memory import shaped
from ..machine import atomic
from ..machine.errors import first_line
from ..machine.memory import check_room
from .chunk_file import (
    FOREIGN,
    Chunk,
    ChunkReader,
    PrefixHeader,
    bytes_needed,
    read_stored,
    resumable_path,
    write_chunks,
)
from .failures import log
from .prefixes import PrefixTree

ENDING = ".prefix.safetensors"
OURS = re.compile(rf"[0-9a-f]{{32}}{re.escape(ENDING)}")
UNFINISHED = (f"*{ENDING}{atomic.SUFFIX}", f".*{ENDING}-*.safetensors")  # the second: earlier versions


class Outgrown(Exception):
    """Raised when a sequence got more chunks while it was being written."""


class PrefixFiles:
    """A directory with a file for each sequence of a prefix tree; several servers may share it.

    Files of another model, cache layout, version or machine are not used, but their bytes count.
    limit: maximum bytes of all files; the least recently used ones are removed. known: the header of each file; it
    is FOREIGN if the file has another format, or could not be loaded or removed.
    """

    def __init__(self, directory: Path, limit: int):
        self.directory, self.limit = directory, limit
        self.known: dict[Path, PrefixHeader] = {}
        self._writing: Iterator[int] | None = None
        directory.mkdir(parents=True, exist_ok=True)
        for file in self._unfinished():
            if atomic.is_abandoned(file):
                with contextlib.suppress(OSError):
                    file.unlink()
        self._refresh()

    def load(self, tree: PrefixTree, tokens: Sequence[int]) -> None:
        """Add the longest prefix of `tokens` in a file to the tree if it is longer than the tree's.

        Files found damaged, or changed since their header was read, are removed; one that cannot be
        read, or does not fit in memory, is ignored from now on.
        """
        covered = tree.covered(tokens)
        self._refresh()
        while tree.limit and (found := self._longest(tree, tokens, covered)):
            with contextlib.suppress(FileNotFoundError), self._reading(found[0]):
                return self._graft(tree, *found)

    def save(self, tree: PrefixTree, until: float = float("inf")) -> None:
        """Write the sequences of `tree.trees` that no file contains, the last used first.

        Warn and stop after `until` (of time.monotonic()), or after a failure.
        """
        while self.step(tree):
            if time.monotonic() > until:
                log.warning("not all prefixes were written to %s before the server ended", self.directory)
                self._writing = None
                break

    def step(self, tree: PrefixTree) -> bool:
        """Write a piece of a sequence that no file contains; return False if none is left or after a failure."""
        self._writing = self._writing or self._pieces(tree)
        try:
            next(self._writing)
            return True
        except StopIteration:
            pass
        except Exception as e:  # for example a full disk, or another server that writes the same file
            log.warning("prefix file not written: %s", first_line(e))
        self._writing = None
        return False

    def _pieces(self, tree: PrefixTree) -> Iterator[int]:
        """Write the sequences that no file contains, a piece before each yield; the tree may change in between.

        Each is written up to its last checkpoint, without a tail (`Chunk.is_tail`).
        """
        tried: set[Chunk] = set()
        self._refresh()
        self._make_room(0, float("inf"), ())
        while leaves := [(t, leaf) for t in tree.trees for leaf in t.leaves(tails=False) if leaf not in tried]:
            of, leaf = max(leaves, key=lambda found: found[1].used)
            tried.add(leaf)
            path = resumable_path(leaf.path())
            if path and not self._is_stored(of, path):
                with contextlib.suppress(Outgrown):
                    yield from self._write(of, path, leaf)

    def _write(self, tree: PrefixTree, path: list[Chunk], leaf: Chunk) -> Iterator[int]:
        """Write a sequence to a file, a piece before each yield, then remove the files that it replaces.

        Writes nothing if the file does not fit in `limit` (`_make_room`). Raises ValueError if the disk is too full;
        Outgrown, and leaves no file, if between two pieces `leaf` gets a child that is not a tail.
        """
        tokens, resumable = _tokens(path), _resumable(path)
        file = self.directory / _name(tree.identity, tokens)
        usable = [(f, own) for f, own in self._usable(tree) if own.resumable <= resumable]
        replaced = {f for f, own in usable if tokens[: len(own)] == own.tokens}
        size, used = bytes_needed(path), path[-1].used
        if not self._make_room(size, used, replaced):
            return
        atomic.check_free(file, size)
        with atomic.file(file) as work:
            for written in write_chunks(work, path, tree.identity):
                yield written
                if any(not child.is_tail for child in leaf.children.values()):
                    raise Outgrown
        os.utime(file, (used, used))
        self.known[file] = read_stored(file)
        for each in replaced - {file}:
            self._remove(each)

    def _graft(self, tree: PrefixTree, file: Path, last: int) -> None:
        """Add a file's chunks up to position `last` that the tree lacks; stop where `primed` of a chunk differs.

        Raises ValueError if the file is damaged or has changed, MemoryError if the chunks do not fit in memory.
        """
        with file.open("rb") as f:  # the same file even if another process replaces it
            reader, chunk, begin = ChunkReader(f, file), tree.root, 0
            stored = reader.stored
            if stored != self.known[file]:
                raise ValueError(f"{file}: changed")
            ends, like = [end for end in stored.ends if end <= last], shaped(tree.blank)
            _check_memory(file, sum(reader.bytes_of(i) for i in range(len(ends))))
            for i, end in enumerate(ends):
                known = chunk.children.get(tuple(stored.tokens[begin:end]))
                if known is None or (known.checkpoint is None and end in stored.resumable):
                    known = tree.graft(chunk, reader.chunk(i, like, chunk.primed))
                if known is None or known.primed != reader.primed(i):
                    break
                chunk, begin = known, end
        tree.use(chunk)
        with contextlib.suppress(OSError):
            file.touch()

    def _usable(self, tree: PrefixTree) -> list[tuple[Path, PrefixHeader]]:
        """List the files, with their headers, whose rows the tree can use: those of its identity."""
        known = [(file, own) for file, own in self.known.items() if own is not FOREIGN]
        return [(file, own) for file, own in known if own.identity == tree.identity]

    def _longest(self, tree: PrefixTree, tokens: Sequence[int], covered: int) -> tuple[Path, int] | None:
        """Return the file with the longest prefix of `tokens` that can be reused, and that prefix's length.

        It ends at a checkpoint, before the last of `tokens`. None if none is longer than `covered`.
        """
        found, cuts = [], set(tree.chunking.cuts(tokens))
        for file, own in self._usable(tree):
            same = min(shared(own.tokens, tokens), len(tokens) - 1)
            allowed = cuts | {len(own)} if tree.decoded else cuts
            found += [(end, file) for end in own.resumable & allowed if covered < end <= same]
        return max(found)[::-1] if found else None

    def _is_stored(self, tree: PrefixTree, path: list[Chunk]) -> bool:
        """Return whether a file contains a path; if so, set its time to at least that of the path's last use."""
        tokens, resumable, used = _tokens(path), _resumable(path), path[-1].used
        for file, own in self._usable(tree):
            if resumable <= own.resumable and own.tokens[: len(tokens)] == tokens:
                if file.stat().st_mtime < used:
                    os.utime(file, (used, used))
                return True
        return False

    def _refresh(self) -> None:
        """Update `known` from the directory, in which other servers write and remove files as well."""
        found = {file for file in self.directory.glob(f"*{ENDING}") if OURS.fullmatch(file.name)}
        self.known = {file: own for file, own in self.known.items() if file in found}
        for file in found - self.known.keys():
            with contextlib.suppress(FileNotFoundError), self._reading(file):
                self.known[file] = own = read_stored(file)
                if own is not FOREIGN and file.name != _name(own.identity, own.tokens):
                    raise ValueError(f"{file}: its content does not match its name")

    def _make_room(self, size: int, used: float, replaced: Collection[Path]) -> bool:
        """Remove files last used before `used`, the oldest first, so that `size` more bytes fit; return True.

        If they do not fit, remove none and return False; with size 0 remove these files and return True.
        used: in seconds since 1970. replaced: files whose bytes do not count.
        """
        counted = [*self._unfinished(), *(file for file in self.known if file not in replaced)]
        infos = {file: info for file in counted if (info := _info(file))}
        excess, removed = size + sum(info.st_size for info in infos.values()) - self.limit, []
        for file in sorted(infos.keys() & self.known.keys(), key=lambda file: infos[file].st_mtime):
            if excess > 0 and infos[file].st_mtime < used:
                removed.append(file)
                excess -= infos[file].st_size
        if size and excess > 0:
            return False
        for file in removed:
            self._remove(file)
        return True

    def _unfinished(self) -> list[Path]:
        """List incomplete files that a process is writing or has abandoned."""
        return [file for pattern in UNFINISHED for file in self.directory.glob(pattern)]

    @contextlib.contextmanager
    def _reading(self, file: Path) -> Iterator[None]:
        """Log an error of the block: a damaged file (ValueError) is removed, one that cannot be read becomes FOREIGN.

        So does a damaged one that cannot be removed. Raises FileNotFoundError for a file that is gone.
        """
        try:
            yield
        except FileNotFoundError:
            self.known.pop(file, None)
            raise
        except Exception as e:  # an unreadable file must not fail a request
            self.known[file] = FOREIGN
            is_damaged = isinstance(e, ValueError)
            log.warning("prefix file %s: %s", "removed" if is_damaged else "not read", first_line(e))
            if is_damaged:
                with contextlib.suppress(OSError):
                    self._remove(file)

    def _remove(self, file: Path) -> None:
        file.unlink(missing_ok=True)
        self.known.pop(file, None)


def _name(identity: str, tokens: Sequence[int]) -> str:
    """Return the name of the file for a sequence: a digest of everything that determines its content."""
    return hashlib.sha256(repr((identity, [*tokens])).encode()).hexdigest()[:32] + ENDING


def _tokens(path: list[Chunk]) -> list[int]:
    return [token for chunk in path for token in chunk.tokens]


def _resumable(path: list[Chunk]) -> set[int]:
    """Return the positions of a path at which sequences can continue."""
    return {chunk.checkpoint.length for chunk in path if chunk.checkpoint}


def _info(file: Path) -> os.stat_result | None:
    """Return the size and times of a file; None if it does not exist or cannot be read."""
    with contextlib.suppress(OSError):
        return file.stat()
    return None


def _check_memory(file: Path, needed: int) -> None:
    """Raise MemoryError if the bytes needed from a file do not fit in memory."""
    try:
        check_room(f"{file}:", needed, ignore=False)
    except ValueError as e:
        raise MemoryError(first_line(e)) from e
