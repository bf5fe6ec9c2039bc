"""Remember the beginnings of prompts: a tree of chunks of tokens, with what the caches hold behind each.

A prompt's tokens alone decide in which chunks it is read, not what is remembered of it. A chunk that is taken from
the tree was computed of the same tokens, in the same shapes, on top of the same state as one that the model reads: so
an answer's bits do not depend on what the tree holds. Answers, which are decoded in other shapes, are read once more
for it, but for models whose rows come out alike in all shapes (`rows_alike`).
"""

import hashlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from typing import NamedTuple

import mlx.core as mx

from .._version import __version__
from ..cache.file import fingerprint
from ..cache.layer_cache import Parts
from ..cache.mark import Mark
from ..cache.pieces import Checkpoint, buffers, checkpoint_of, cut, has_rows, join
from ..cache.prompt_cache import PromptCache
from ..cache.prompt_prefix import shared
from ..decoding.prefill import evaluated, without_refused
from ..layers.target import Target
from ..machine.memory import METAL_BUFFERS
from ..tuning.kernel_fallback import run_first

MOST_BUFFERS = METAL_BUFFERS // 20  # of a tree: with the model and active requests it stays below a tenth
LAST = 4  # rows that `rows_alike` compares, as many as a cycle with three drafts checks
TICK = 1e-6  # seconds between two uses, at least
NEAR = 4  # times as far from a plain step's as checked drafts' rows are: a chunk's are of that kind


class Chunking(NamedTuple):
    """The rule by which texts are cut: chunks have `step` tokens, or end with a turn, if they have `least` by then.

    ends: the tokens that end turns; a chunk ends in front of one, where what was written as an answer ends.
    """

    step: int
    least: int = 1
    ends: frozenset[int] = frozenset()

    def cuts(self, tokens: Sequence[int]) -> list[int]:
        """List where chunks end, each of them behind the tokens in front of it and decided by those and the next."""
        found, begun = [], 0
        for i, token in enumerate(tokens):
            if i - begun == self.step or (token in self.ends and i - begun >= self.least):
                found.append(i)
                begun = i
        return found


@dataclass(eq=False)
class Chunk:
    """Tokens behind those of its `parent`, the caches' rows of them, and perhaps the moment at their end.

    primed: positions that the heads have read there. used: when it was needed last (`time.time()`). is_rest: it was
    made where no chunk ends by the rule, at a prompt's end.
    """

    tokens: tuple[int, ...] = ()
    parent: "Chunk | None" = None
    rows: list[Parts] = field(default_factory=list)
    moment: Checkpoint | None = None
    primed: int = 0
    used: float = 0.0
    is_rest: bool = False
    children: dict[tuple[int, ...], "Chunk"] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        held = [part for parts in self.rows for part in parts] + (self.moment.arrays if self.moment else [])
        return sum(part.nbytes for part in held)

    @property
    def buffers(self) -> int:
        """Number of buffers: one per type of its rows, and one per type of its moment's arrays."""
        rows = (part for parts in self.rows for part in parts)
        return buffers(rows) + (buffers(self.moment.arrays) if self.moment else 0)

    def path(self) -> list["Chunk"]:
        """List the chunks from the first one of the text to this one."""
        chunks, chunk = [], self
        while chunk.parent is not None:
            chunks.append(chunk)
            chunk = chunk.parent
        return chunks[::-1]


def resumable(path: list[Chunk]) -> list[Chunk]:
    """Cut a path behind the last chunk at whose end texts can go on."""
    return path[: max((i for i, chunk in enumerate(path, 1) if chunk.moment), default=0)]


class PrefixTree:
    """Chunks of tokens, shared by all texts that begin alike, the least recently used ones dropped first.

    blank: an empty cache of the layout that all have. limit: most bytes; 0 remembers nothing. most_buffers: most
    buffers. decoded: answers may be remembered as decoding left them; None until `comparisons` has decided it, which
    counts as False.
    """

    decoded: bool | None = False

    def __init__(self, blank: PromptCache, chunking: Chunking, limit: int, most_buffers: int = MOST_BUFFERS):
        self.blank, self.chunking, self.limit, self.most_buffers = blank, chunking, limit, most_buffers
        self.root, self.nbytes, self.buffers, self.chunks = Chunk(), 0, 0, 0
        self._now = 0.0
        self.every_moment = all(has_rows(c) for c in blank.caches)  # then a moment takes next to nothing

    @cached_property
    def identity(self) -> str:
        """Digest of all that the bits of a chunk depend on beside its tokens."""
        blank, device = self.blank, mx.device_info()
        facts = (
            [fingerprint(blank.model, heads=heads) for heads in ([False, True] if blank.heads else [False])],
            [c.config for c in blank.caches],
            blank.quantizing and asdict(blank.quantizing),
            blank.reach,
            (self.chunking.step, self.chunking.least, sorted(self.chunking.ends)),
            (__version__, version("mlx"), version("mlx-lm")),
            (str(mx.default_device()), device.get("architecture"), device.get("device_name")),
            os.environ.get("LD_PRELOAD"),  # another BLAS rounds otherwise
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()

    @property
    def stores(self) -> bool:
        """Whether it remembers anything: it has a limit, and caches that can be cut."""
        return bool(self.limit and not self.blank.is_mlx_lm)

    @property
    def uncut(self) -> int:
        """Most tokens at a prompt's end that decoding may read at once, as what it leaves is cut without loss."""
        return self.chunking.step if self.decoded and self.every_moment else 0

    def take(self, tokens: Sequence[int], room: int) -> PromptCache:
        """Make a cache of the longest remembered beginning of `tokens`, with room for so many positions."""
        return self.joined(self._known(tokens), room)

    def joined(self, path: list[Chunk], room: int) -> PromptCache:
        """Make a cache of the chunks of a path, up to the last moment of it."""
        path = resumable(path)
        if not path:
            return self.blank.like_new()
        at, tokens = path[-1].moment, [token for chunk in path for token in chunk.tokens]
        assert at is not None
        return join(self.blank, [chunk.rows for chunk in path], at, tokens, room)

    def covered(self, tokens: Sequence[int]) -> int:
        """Count the tokens that `take` would find."""
        return max((chunk.moment.length for chunk in self._known(tokens) if chunk.moment), default=0)

    def store(self, cache: PromptCache, *, resumes: bool) -> None:
        """Remember the last chunk of a cache that rests where one ends, if those before are remembered.

        resumes: later texts may go on from here; where moments are small all of them can. Of decoded answers all
        chunks are remembered.
        """
        if self.decoded:
            self.insert(cache)
            return
        if not self._takes(cache):
            return
        *before, last = self._split(cache.tokens, cache.offset)
        known = self._walk(before)
        if len(known) < len(before):
            return
        chunk = self._child(known[-1] if known else self.root, last, cache, cache.offset, cache.primed)
        self._finish(chunk, cache, resumes=resumes or self.every_moment)

    def insert(self, cache: PromptCache, *, is_rest: bool = False) -> None:
        """Remember all tokens of a cache that rests where a chunk ends; texts may go on from there.

        is_rest: it rests elsewhere, as only caches of decoded answers may.
        """
        if not self._takes(cache):
            return
        chunk, end = self.root, 0
        for part in self._split(cache.tokens, cache.offset):
            end += len(part)
            last, new = end == cache.offset, part not in chunk.children
            chunk = self._child(chunk, part, cache, end, cache.primed if last else min(end - 1, cache.primed))
            chunk.is_rest = is_rest and last and (new or chunk.is_rest)
        self._finish(chunk, cache, resumes=True)

    def keep(self, prompt: Sequence[int], cache: PromptCache) -> PromptCache | None:
        """Remember the rows of a decoded answer's cache that `prompt` begins with; return a cache of these rows.

        None where there are no more of them than are remembered, where rows may not be as if read, and where a state
        or a window that has wrapped cannot go back to the place at which the prompt differs.
        """
        length = shared(cache.tokens, prompt) if self.decoded else 0
        if length <= self.covered(prompt[: length + 1]) or (found := _trimmed(cache, length)) is None:
            return None
        cuts = self.chunking.cuts(prompt[: length + 1])
        if (whole := _trimmed(cache, max((cut for cut in cuts if cut < length), default=0))) is not None:
            self.insert(whole)  # files end there, and so do prompts that differ later
        self.insert(found, is_rest=length not in cuts)
        return found

    def _child(self, above: Chunk, part: tuple[int, ...], cache: PromptCache, end: int, primed: int) -> Chunk:
        """Find the chunk of these tokens behind another one, or make it of the rows that end at a position."""
        if (chunk := above.children.get(part)) is None:
            rows = cut(cache, (end - len(part), end), (above.primed, primed))
            chunk = above.children[part] = Chunk(part, above, rows, primed=primed)
            self._count(chunk)
        return chunk

    def _finish(self, chunk: Chunk, cache: PromptCache, *, resumes: bool) -> None:
        if chunk.moment is None and resumes:
            self._count(chunk, -1)
            chunk.moment = checkpoint_of(cache)
            self._count(chunk)
        path = chunk.path()
        mx.eval([part for each in path for parts in each.rows for part in parts])
        mx.eval(chunk.moment.arrays if chunk.moment else [])
        self.use(chunk)

    def graft(self, above: Chunk, chunk: Chunk) -> Chunk | None:
        """Add a chunk behind another one; return the tree's chunk of these tokens, None if its `primed` differs."""
        known = above.children.get(chunk.tokens)
        if known is None:
            above.children[chunk.tokens], chunk.parent = chunk, above
            self._count(chunk)
            return chunk
        if known.primed != chunk.primed:
            return None
        self._count(known, -1)
        known.moment = known.moment or chunk.moment
        self._count(known)
        return known

    def use(self, chunk: Chunk) -> None:
        """Mark a chunk and those before it as the last used ones, and drop what exceeds the limit."""
        self._touch(chunk)
        self._shrink()

    def leaves(self, *, rests: bool = True) -> Iterator[Chunk]:
        """Yield the chunks at which texts end; rests: with those that only a prompt's end has made."""
        found = [self.root]
        while found:
            chunk = found.pop()
            below = [child for child in chunk.children.values() if rests or not child.is_rest]
            found += below
            if chunk is not self.root and not below:
                yield chunk

    def clear(self) -> None:
        """Forget everything."""
        self.root, self.nbytes, self.buffers, self.chunks = Chunk(), 0, 0, 0

    def _count(self, chunk: Chunk, sign: int = 1) -> None:
        """Add a chunk to what is held, or with sign -1 take it away."""
        self.nbytes += sign * chunk.nbytes
        self.buffers += sign * chunk.buffers
        self.chunks += sign

    def _takes(self, cache: PromptCache) -> bool:
        """Tell whether a cache can be remembered: not an empty one, or one of another layout."""
        return bool(self.stores and cache.offset and cache.quantizing == self.blank.quantizing)

    def _split(self, tokens: Sequence[int], *ends: int) -> list[tuple[int, ...]]:
        """Cut tokens into chunks; ends: where one more is known to end."""
        ends = (*self.chunking.cuts(tokens), *ends)
        return [tuple(tokens[a:b]) for a, b in itertools.pairwise((0, *ends))]

    def _walk(self, parts: list[tuple[int, ...]]) -> list[Chunk]:
        """Find the chunks of these tokens, as far as they are remembered."""
        found, chunk = [], self.root
        for part in parts:
            if (chunk := chunk.children.get(part)) is None:
                break
            found.append(chunk)
        return found

    def _known(self, tokens: Sequence[int]) -> list[Chunk]:
        """Find the chunks of a text, and behind them the longest end of another one that it goes on from."""
        found = self._walk(self._split(tokens))
        above, rest = found[-1] if found else self.root, tuple(tokens[sum(len(chunk.tokens) for chunk in found) :])
        ends = [c for part, c in above.children.items() if len(part) < len(rest) and part == rest[: len(part)]]
        if self.decoded and ends:
            found.append(max(ends, key=lambda c: len(c.tokens)))
        if found:
            self._touch(found[-1])
        return found

    def _touch(self, chunk: Chunk) -> None:
        self._now = max(time.time(), self._now + TICK)
        for each in chunk.path():
            each.used = self._now

    def _shrink(self) -> None:
        """Drop the least recently used ends of texts until bytes and buffers are within their limits."""
        while self.nbytes > self.limit or self.buffers > self.most_buffers:
            chunk = min(self.leaves(), key=lambda c: c.used)
            assert chunk.parent is not None
            self._count(chunk, -1)
            del chunk.parent.children[chunk.tokens]


def _trimmed(cache: PromptCache, length: int) -> PromptCache | None:
    """Return a cache cut to a length; None where it cannot be."""
    if length == cache.offset:
        return cache
    trimmed = cache.copy()
    return trimmed if length and trimmed.trim(cache.offset - length) else None


def rows_alike(model: Target, blank: PromptCache, rows: int) -> bool:
    """Compare what a model computes of tokens read one by one, a few at once, and `rows` (more than 4) at once.

    True where a chunk's rows are as near to plain steps' as those of checked drafts, on which every answer rests:
    to the bit with MLX's own BLAS, to the rounding of float32 with one that rounds a row by how many there are.
    False for other types.

    blank: an empty cache.
    """
    *_, found = comparisons(model, blank, rows)
    return found


def comparisons(model: Target, blank: PromptCache, rows: int) -> Iterator[bool]:
    """Do as `rows_alike` step by step: yield False behind each forward pass but the last, then the result.

    A model that does not compute in float32 takes no pass.
    """
    if model.no_hidden().dtype != mx.float32:
        yield False
        return
    chunk = _computed(model, blank.like_new(), 0, rows)
    yield False
    before, first, plain = blank.like_new(), rows - LAST, []
    _computed(model, before, 0, first)
    yield False
    cache = before.copy()
    for position in range(first, rows):
        plain.append(_computed(model, cache, position, 1))
        yield False
    checked = _computed(model, before, first, LAST)
    steps = mx.concatenate(plain, axis=1)
    yield _apart(steps, chunk[:, -LAST:]) <= NEAR * _apart(steps, checked)


def _hidden(model: Target, cache: PromptCache, begun: int, n: int) -> mx.array:
    """Return hidden rows [1, n, H] of n tokens from position `begun` on, which the cache is read up to."""
    tokens = mx.arange(begun, begun + n) * 7 % model.vocab_size
    return model.hidden(tokens[None], cache.layers)


def _computed(model: Target, cache: PromptCache, begun: int, n: int) -> mx.array:
    """Compute the rows of `_hidden`, without kernels that are refused."""
    return without_refused(model, _computed_from, model, cache, cache.mark(), begun, n)


def _computed_from(model: Target, cache: PromptCache, mark: Mark, begun: int, n: int) -> mx.array:
    cache.restore(mark)
    hidden = _hidden(model, cache, begun, n)
    run_first(model)
    evaluated(mx.eval, hidden, cache.arrays)
    return hidden


def _apart(a: mx.array, b: mx.array) -> float:
    return float(mx.abs(a - b).max())
