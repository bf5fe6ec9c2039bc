"""Implement the prefix cache: a tree of chunks of prompt tokens, each with its rows of the KV caches.

A prompt is cut into chunks by its tokens alone, whatever the tree contains. A reused chunk was computed from the same
tokens, in the same shapes, on the same state as a new prefill would be, so no bit of a response depends on the tree.
Decoding computes rows in other shapes: its rows are stored only for models that pass `comparisons`; the answers of
other models are prefilled.
"""

import hashlib
import itertools
import os
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from importlib.metadata import version
from typing import NamedTuple

import mlx.core as mx

from .._version import __version__
from ..cache.file import fingerprint
from ..cache.mark import Mark
from ..cache.pieces import checkpoint_of, cut, has_rows, join
from ..cache.prompt_cache import PromptCache
from ..cache.prompt_prefix import shared
from ..decoding.prefill import evaluated, without_refused
from ..layers.adapters import adapters_now
from ..layers.target import Target
from ..machine.memory import METAL_BUFFERS
from ..pictures.rows import places_in
from ..tuning.kernel_fallback import run_first
from .chunk_file import Chunk, resumable_path

MAX_BUFFERS = METAL_BUFFERS // 20  # of a tree; with the model and active requests less than a tenth is used
LAST = 4  # rows that `comparisons` compares: those of a cycle with three drafts
TICK = 1e-6  # minimum seconds between two uses, so that their order is certain
NEAR = 4  # allowed difference of a chunk's rows from plain steps, relative to that of verify rows


class Chunking(NamedTuple):
    """The rule that cuts tokens into chunks of `step` tokens, or fewer (at least `least`) that end with a turn.

    ends: the tokens that end turns. A chunk ends before one of them, where a decoded answer ends as well. Before and
    behind each picture a chunk ends, too, even with fewer than `least` tokens.
    """

    step: int
    least: int = 1
    ends: frozenset[int] = frozenset()

    def cuts(self, tokens: Sequence[int]) -> list[int]:
        """List the end positions of the chunks; the tokens after the last one are in none.

        Each position depends only on the tokens before it and on the next one.
        """
        found, begun = [], 0
        edges = {edge for place in places_in(tokens) for edge in (place.first, place.end)} - {0}
        for i, token in enumerate(tokens):
            turn = token in self.ends and i - begun >= self.least
            if i - begun == self.step or turn or i in edges:
                found.append(i)
                begun = i
        return found


class PrefixTree:
    """The prefix cache; the least recently used leaves are evicted first.

    blank: an empty prompt cache with the layout of all. chunking: the rule that cuts prompts into chunks.
    limit: maximum bytes; 0 disables the tree. max_buffers: maximum number of Metal buffers.
    trees: this tree and those of the model's other adapters, which share the limits. other: one of those.
    adapted: selects the adapter that was selected when the tree was created.
    decoded: whether rows computed by decoding may be stored; None (as False) until `comparisons` has ended.
    is_stateless: all layers store rows, so that sequences can continue at any position.
    """

    decoded: bool | None = False

    def __init__(
        self,
        blank: PromptCache,
        chunking: Chunking,
        limit: int,
        max_buffers: int = MAX_BUFFERS,
        other: "PrefixTree | None" = None,
    ):
        self.blank, self.chunking, self.limit, self.max_buffers = blank, chunking, limit, max_buffers
        self._lane = blank.model.runtime.lane_key
        self.clear()
        self.trees: list[PrefixTree] = other.trees if other else []
        self.trees.append(self)
        self.adapted = adapters_now(blank.model)
        self._now = 0.0
        self.is_stateless = all(has_rows(c) for c in blank.caches)

    @property
    def root(self) -> Chunk:
        """The empty chunk at the start of all sequences; a change of the model's lane drops those of the other."""
        if self._lane != (lane := self.blank.model.runtime.lane_key):
            self._lane = lane
            self.clear()
        return self._root

    @property
    def identity(self) -> str:
        """SHA-256, in hexadecimal, of everything except the tokens that determines the bits of a chunk."""
        lane = self.blank.model.runtime.lane_key
        return hashlib.sha256(repr((*self._facts, *([] if lane == "exact" else [lane]))).encode()).hexdigest()

    @cached_property
    def _facts(self) -> tuple:
        """All facts of `identity` except the lane."""
        blank, device = self.blank, mx.device_info()
        with self.adapted():
            model = [fingerprint(blank.model, heads=heads) for heads in ([False, True] if blank.heads else [False])]
        return (
            model,
            [c.config for c in blank.caches],
            blank.quantizing and asdict(blank.quantizing),
            blank.reach,
            (self.chunking.step, self.chunking.least, sorted(self.chunking.ends)),
            (__version__, version("mlx"), version("mlx-lm")),
            (str(mx.default_device()), device.get("architecture"), device.get("device_name")),
            os.environ.get("LD_PRELOAD"),  # another BLAS may round differently
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all trees."""
        return sum(tree.size["nbytes"] for tree in self.trees)

    @property
    def buffers(self) -> int:
        """Number of Metal buffers of all trees."""
        return sum(tree.size["buffers"] for tree in self.trees)

    @property
    def chunks(self) -> int:
        """Number of chunks of all trees."""
        return sum(tree.size["chunks"] for tree in self.trees)

    @property
    def stores(self) -> bool:
        """Whether the tree stores anything: it has a limit, and the caches can be cut."""
        return bool(self.limit and not self.blank.is_mlx_lm)

    @property
    def uncut_tail(self) -> int:
        """Maximum tokens at a prompt's end that are not cut into chunks, but prefilled by decoding.

        0, so that decoding prefills only the tokens after the last chunk, if its rows cannot be stored.
        """
        return self.chunking.step if self.decoded and self.is_stateless else 0

    def take(self, tokens: Sequence[int], room: int) -> PromptCache:
        """Return a cache with the longest stored prefix of `tokens`, never all of them; empty if none is stored.

        room: number of tokens, with those of the prefix, for which its buffers have room. The prefix ends at a
        checkpoint, and counts as used now.
        """
        path = resumable_path(self._matching(tokens))
        if not path:
            return self.blank.like_new()
        checkpoint, stored = path[-1].checkpoint, [token for chunk in path for token in chunk.tokens]
        assert checkpoint is not None
        return join(self.blank, [chunk.rows for chunk in path], checkpoint, stored, room)

    def covered(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens in the cache that `take` would return; the chunks count as used now."""
        return max((chunk.checkpoint.length for chunk in self._matching(tokens) if chunk.checkpoint), default=0)

    def store(self, cache: PromptCache, *, resumable: bool) -> None:
        """Store the last chunk of a cache that ends where a chunk ends; nothing if the tree lacks an earlier chunk.

        If `decoded`, as `insert`: missing earlier chunks are stored too, and the last one has a checkpoint.
        resumable: add a checkpoint; with `is_stateless` one is always added. Nothing unless `_can_store`.
        """
        if self.decoded:
            self.insert(cache)
            return
        if not self._can_store(cache):
            return
        *before, last = self._split(cache.tokens, cache.offset)
        known = self._walk(before)
        if len(known) < len(before):
            return
        chunk = self._child(known[-1] if known else self.root, last, cache, cache.offset, cache.primed)
        self._finish(chunk, cache, resumable=resumable or self.is_stateless)

    def insert(self, cache: PromptCache, *, is_tail: bool = False) -> None:
        """Store all chunks of a cache, and its rest as a last one, with a checkpoint; nothing unless `_can_store`.

        is_tail: no chunk ends at the cache's end by `Chunking`.
        """
        if not self._can_store(cache):
            return
        chunk, end = self.root, 0
        for part in self._split(cache.tokens, cache.offset):
            end += len(part)
            last, new = end == cache.offset, part not in chunk.children
            chunk = self._child(chunk, part, cache, end, cache.primed if last else min(end - 1, cache.primed))
            chunk.is_tail = is_tail and last and (new or chunk.is_tail)
        self._finish(chunk, cache, resumable=True)

    def keep(self, prompt: Sequence[int], cache: PromptCache) -> PromptCache | None:
        """Store the rows of a cache that decoding has filled, as far as `prompt` has the same tokens.

        Return a cache of these tokens: `cache` itself if it has no others, else a trimmed copy. None if there are
        none, if the tree has these rows, if it may not store decoded rows, or if a recurrent state or a wrapped
        window cannot be trimmed to where the prompt differs.
        """
        length = shared(cache.tokens, prompt) if self.decoded else 0
        if length <= self.covered(prompt[: length + 1]) or (found := _trimmed(cache, length)) is None:
            return None
        cuts = self.chunking.cuts(prompt[: length + 1])
        if (whole := _trimmed(cache, max((cut for cut in cuts if cut < length), default=0))) is not None:
            self.insert(whole)  # files and diverging prompts end there
        self.insert(found, is_tail=length not in cuts)
        return found

    def _child(self, above: Chunk, part: tuple[int, ...], cache: PromptCache, end: int, primed: int) -> Chunk:
        """Return the child of a chunk for these tokens; create it from the rows before position `end` if missing.

        primed: that of a new chunk, as in `Chunk`.
        """
        if (chunk := above.children.get(part)) is None:
            rows = cut(cache, (end - len(part), end), (above.primed, primed))
            chunk = above.children[part] = Chunk(part, above, rows, primed=primed)
            self._count(chunk)
        return chunk

    def _finish(self, chunk: Chunk, cache: PromptCache, *, resumable: bool) -> None:
        if chunk.checkpoint is None and resumable:
            self._count(chunk, -1)
            chunk.checkpoint = checkpoint_of(cache)
            self._count(chunk)
        mx.eval([each.arrays for each in chunk.path()])
        self.use(chunk)

    def graft(self, above: Chunk, chunk: Chunk) -> Chunk | None:
        """Add a chunk after another one; return the tree's chunk of these tokens.

        That is one already there, to which only a missing checkpoint is added; None if its `primed` differs. Nothing
        is evicted before `use`.
        """
        known = above.children.get(chunk.tokens)
        if known is None:
            above.children[chunk.tokens], chunk.parent = chunk, above
            self._count(chunk)
            return chunk
        if known.primed != chunk.primed:
            return None
        self._count(known, -1)
        known.checkpoint = known.checkpoint or chunk.checkpoint
        self._count(known)
        return known

    def use(self, chunk: Chunk) -> None:
        """Mark a chunk and its ancestors as used now; evict leaves of all trees while these exceed the limits.

        The least recently used leaf is evicted first. The limits are `limit` bytes and `max_buffers` Metal buffers,
        of all trees together.
        """
        self._touch(chunk)
        while self.nbytes > self.limit or self.buffers > self.max_buffers:
            leaves = [(leaf.used, i, leaf) for i, tree in enumerate(self.trees) for leaf in tree.leaves()]
            _, i, oldest = min(leaves, key=lambda found: found[0])
            assert oldest.parent is not None
            self.trees[i]._count(oldest, -1)
            del oldest.parent.children[oldest.tokens]

    def leaves(self, *, tails: bool = True) -> Iterator[Chunk]:
        """Yield the last chunk of each sequence; with tails=False the last one that is no tail."""
        found = [self.root]
        while found:
            chunk = found.pop()
            below = [child for child in chunk.children.values() if tails or not child.is_tail]
            found += below
            if chunk is not self.root and not below:
                yield chunk

    def clear(self) -> None:
        """Remove all chunks of this tree."""
        self._root, self.size = Chunk(), Counter[str]()  # bytes, buffers and chunks of this tree

    def _count(self, chunk: Chunk, sign: int = 1) -> None:
        """Add the size of a chunk to the tree's, or subtract it with sign -1."""
        self.size.update(nbytes=sign * chunk.nbytes, buffers=sign * chunk.buffers, chunks=sign)

    def _can_store(self, cache: PromptCache) -> bool:
        """Return whether a cache can be stored: it is not empty, and the tree `stores`, in the same quantization."""
        return bool(self.stores and cache.offset and cache.quantizing == self.blank.quantizing)

    def _split(self, tokens: Sequence[int], *ends: int) -> list[tuple[int, ...]]:
        """Cut tokens into chunks, without those after the last end. ends: end positions after those of `Chunking`."""
        ends = (*self.chunking.cuts(tokens), *ends)
        return [tuple(tokens[a:b]) for a, b in itertools.pairwise((0, *ends))]

    def _walk(self, parts: list[tuple[int, ...]]) -> list[Chunk]:
        """Return the chunks of these token tuples up to the first that is not stored."""
        found, chunk = [], self.root
        for part in parts:
            if (chunk := chunk.children.get(part)) is None:
                break
            found.append(chunk)
        return found

    def _matching(self, tokens: Sequence[int]) -> list[Chunk]:
        """Return the path of the stored chunks of `tokens`, which then count as used now.

        If `decoded`, the longest tail or chunk that continues it is added. At least one token is left over.
        """
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


def _trimmed(cache: PromptCache, length: int) -> PromptCache | None:
    """Return the cache itself if it has this length, else a trimmed copy; None if that is impossible or empty."""
    if length == cache.offset:
        return cache
    trimmed = cache.copy()
    return trimmed if length and trimmed.trim(cache.offset - length) else None


def comparisons(model: Target, blank: PromptCache, rows: int) -> Generator[bool, None, None]:
    """Compare the hidden rows of plain steps, of a verify pass, and of a chunk of `rows` (more than 4) tokens.

    Yields False after each forward pass except the last, then the result: whether a chunk's rows differ from those of
    plain steps by at most NEAR times the difference of verify rows. With MLX's own BLAS both are 0; with a BLAS whose
    rounding depends on the number of rows both are roundings of float32. Other dtypes yield False, without a pass.
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


def _computed(model: Target, cache: PromptCache, begin: int, n: int) -> mx.array:
    """Append n fixed tokens at position `begin`, the cache's length; return their hidden rows [1, n, H].

    Repeats the pass without a kernel that Metal refuses.
    """
    return without_refused(model, _computed_from, model, cache, cache.mark(), begin, n)


def _computed_from(model: Target, cache: PromptCache, mark: Mark, begin: int, n: int) -> mx.array:
    cache.restore(mark)
    tokens = mx.arange(begin, begin + n) * 7 % model.vocab_size
    hidden = model.hidden(tokens[None], cache.layers)
    run_first(model)
    evaluated(mx.eval, hidden, cache.arrays)
    return hidden


def _apart(a: mx.array, b: mx.array) -> float:
    return float(mx.abs(a - b).max())
