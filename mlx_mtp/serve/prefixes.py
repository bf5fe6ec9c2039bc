"""Remember the beginnings of prompts: a tree of chunks of tokens, with what the caches hold behind each.

A prompt is read in chunks that begin at multiples of their length, whatever is remembered of it. A chunk that is read
from the tree was computed of the same tokens, in the same shapes, on top of the same state as one that is read by the
model: so an answer's bits do not depend on what the tree holds.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from ..cache.layer_cache import Parts
from ..cache.pieces import Moment, cut, has_rows, join, moment
from ..cache.prompt_cache import PromptCache


@dataclass(eq=False)
class Chunk:
    """Tokens behind those of its `parent`, the caches' rows of them, and perhaps the moment at their end.

    primed: positions that the heads have read there. used: when it was needed last.
    """

    tokens: tuple[int, ...] = ()
    parent: "Chunk | None" = None
    rows: list[Parts] = field(default_factory=list)
    moment: Moment | None = None
    primed: int = 0
    used: int = 0
    children: dict[tuple[int, ...], "Chunk"] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        held = [part for parts in self.rows for part in parts] + (self.moment.arrays if self.moment else [])
        return sum(part.nbytes for part in held)

    def path(self) -> list["Chunk"]:
        """List the chunks from the first one of the text to this one."""
        chunks, chunk = [], self
        while chunk.parent is not None:
            chunks.append(chunk)
            chunk = chunk.parent
        return chunks[::-1]


class PrefixTree:
    """Chunks of `step` tokens, shared by all texts that begin alike, the least recently used ones dropped first.

    blank: an empty cache of the layout that all have. limit: most bytes; 0 remembers nothing.
    """

    def __init__(self, blank: PromptCache, step: int, limit: int):
        self.blank, self.step, self.limit = blank, step, limit
        self.root, self.nbytes, self.chunks = Chunk(), 0, 0
        self._clock = itertools.count(1)
        self.every_moment = all(has_rows(c) for c in blank.caches)  # then a moment takes next to nothing

    def take(self, tokens: Sequence[int], room: int) -> PromptCache:
        """Make a cache of the longest remembered beginning of `tokens`, with room for so many positions."""
        path = self._known(tokens)
        while path and path[-1].moment is None:
            path.pop()
        if not path:
            return self.blank.like_new()
        at = path[-1].moment
        assert at is not None
        return join(self.blank, [chunk.rows for chunk in path], at, list(tokens[: at.length]), room)

    def covered(self, tokens: Sequence[int]) -> int:
        """Count the tokens that `take` would find."""
        return max((chunk.moment.length for chunk in self._known(tokens) if chunk.moment), default=0)

    def store(self, cache: PromptCache, *, resumes: bool) -> None:
        """Remember the last `step` tokens of a cache at rest, if those before are remembered.

        resumes: later texts may go on from here; where moments are small all of them can.
        """
        if not self._takes(cache):
            return
        *before, last = self._split(cache.tokens)
        known = self._walk(before)
        if len(known) < len(before):
            return
        chunk = self._child(known[-1] if known else self.root, last, cache, cache.offset, cache.primed)
        self._finish(chunk, cache, resumes=resumes or self.every_moment)

    def insert(self, cache: PromptCache) -> None:
        """Remember all tokens of a cache at rest; texts may go on from its end."""
        if not self._takes(cache):
            return
        chunk = self.root
        for i, part in enumerate(self._split(cache.tokens), 1):
            end = i * self.step
            primed = cache.primed if end == cache.offset else min(end - 1, cache.primed)
            chunk = self._child(chunk, part, cache, end, primed)
        self._finish(chunk, cache, resumes=True)

    def _child(self, above: Chunk, part: tuple[int, ...], cache: PromptCache, end: int, primed: int) -> Chunk:
        """Find the chunk of these tokens behind another one, or make it of the rows that end at a position."""
        if (chunk := above.children.get(part)) is None:
            rows = cut(cache, (end - self.step, end), (above.primed, primed))
            chunk = above.children[part] = Chunk(part, above, rows, primed=primed)
            self.nbytes += chunk.nbytes
            self.chunks += 1
        return chunk

    def _finish(self, chunk: Chunk, cache: PromptCache, *, resumes: bool) -> None:
        if chunk.moment is None and resumes:
            self.nbytes -= chunk.nbytes
            chunk.moment = moment(cache)
            self.nbytes += chunk.nbytes
        path = chunk.path()
        mx.eval([part for each in path for parts in each.rows for part in parts])
        mx.eval(chunk.moment.arrays if chunk.moment else [])
        self._touch(chunk)
        self._shrink()

    def leaves(self) -> Iterator[Chunk]:
        """Yield the chunks at which texts end."""
        found = [self.root]
        while found:
            chunk = found.pop()
            found += chunk.children.values()
            if chunk is not self.root and not chunk.children:
                yield chunk

    def clear(self) -> None:
        """Forget everything."""
        self.root, self.nbytes, self.chunks = Chunk(), 0, 0

    def _takes(self, cache: PromptCache) -> bool:
        """Tell whether a cache can be remembered: not in the middle of a chunk, or in another layout."""
        whole = cache.offset and cache.offset % self.step == 0
        return bool(self.limit and whole and not cache.is_mlx_lm and cache.quantizing is self.blank.quantizing)

    def _split(self, tokens: Sequence[int]) -> list[tuple[int, ...]]:
        whole = len(tokens) - len(tokens) % self.step
        return [tuple(tokens[i : i + self.step]) for i in range(0, whole, self.step)]

    def _walk(self, parts: list[tuple[int, ...]]) -> list[Chunk]:
        """Find the chunks of these tokens, as far as they are remembered."""
        found, chunk = [], self.root
        for part in parts:
            if (chunk := chunk.children.get(part)) is None:
                break
            found.append(chunk)
        return found

    def _known(self, tokens: Sequence[int]) -> list[Chunk]:
        found = self._walk(self._split(tokens))
        if found:
            self._touch(found[-1])
        return found

    def _touch(self, chunk: Chunk) -> None:
        now = next(self._clock)
        for each in chunk.path():
            each.used = now

    def _shrink(self) -> None:
        """Drop the ends of texts that were not needed for longest."""
        while self.nbytes > self.limit and (chunk := min(self.leaves(), key=lambda c: c.used, default=None)):
            assert chunk.parent is not None
            self.nbytes -= chunk.nbytes
            self.chunks -= 1
            del chunk.parent.children[chunk.tokens]
