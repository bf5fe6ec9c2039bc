"""Hold the state of one conversation: the target's caches, its MTP heads' caches, and what joins them.

Depth j's slot p (see `draft.py`) lives at position p + j of its cache, so every cache counts positions alike:
position i of depth j reads token x_{i+1}, and all heads stand at the same offset, `primed`.
"""

import copy
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from ..machine.stream import in_turn
from .kinds import from_configs, make_caches
from .layer_cache import CONTEXTS, CachedModel, LayerCache
from .mlx_lm_caches import ListOfOne, MlxLmCaches
from .prompt_prefix import PromptPrefix
from .ring import Ring

GROUP_SIZES = (32, 64, 128)  # that MLX quantizes by
SINKS = 4  # first positions that max_kv_size keeps, as mlx_lm's does: much attention goes there (arXiv 2309.17453)
AT_FIRST = 24  # rows that heads with windows read before they draft: more hardly better their drafts, and take time
SPILL = 16  # the backlog is joined and cut at about this many rows, not at each one


@dataclass
class Mark:
    """A PromptCache's state at one moment, to go back to: references only, nothing is copied.

    held:   (cache, parts, start) of those that a lower offset does not bring back: states, and where the moment is at
            rest wrapped windows too, of which the first write after it makes a copy.
    caches: (cache, offset, limit, parts) of all; None where a later write may be in place.
    """

    length: int
    primed: int
    kept: list[mx.array]
    backlog: list[mx.array]
    held: list[tuple]
    caches: list[tuple] | None
    quantizing: "Quantizing | None"

    def release(self) -> None:
        """Let go of keys and values, so that the next write to them is in place; states are replaced, not written."""
        self.caches = None


class CacheArrays(NamedTuple):
    """The arrays of a PromptCache that a cycle reads and writes; those of idle heads are left out.

    ends: where the target stands, and the heads if they follow it: int32 [1], or an int while the host counts.
    """

    ends: tuple[Any, Any]
    parts: list[Any]
    kept: list[mx.array]


@dataclass(frozen=True)
class Quantizing:
    """Quantize the target's caches before position `start` is read."""

    start: int
    bits: int
    group_size: int


class PromptCache(ListOfOne):
    """Caches of the target (`layers`) and of its heads (`heads`), and the tokens they hold.

    After a generation it holds every token of the conversation except the last one yielded, exactly as if the
    tokens had been decoded one by one. To go on, pass that token and what follows it as the next prompt; to go back,
    `rewind` to a `snapshot`, or `trim`.

    primed:  positions that the heads have read.
    live:    the heads follow the target, cycle by cycle; otherwise hidden rows wait in the backlog.
    backlog: the target's hidden rows [1, r, H] that they have not read yet, ending at the last position held.
    kept:    for depths 1.., the previous depth's output [1, 1, H] at position primed - 1.
    reach:   how many last rows heads read that have been idle, AT_FIRST or all that their windows can see; None
             where a head attends to everything.
    model:   whose state it is.
    prefix:  the text whose tokens it holds, where `mlx-mtp cache-prompt` made it.
    """

    def __init__(
        self, model: CachedModel, layers: list[Any], heads: list[Any], reach: int | None, kept: list[mx.array]
    ):
        self.model, self.layers, self.heads, self.reach = model, layers, heads, reach
        self.tokens: list[int] = []
        self.primed = 0
        self.backlog: list[mx.array] = []
        self.kept = kept
        self.quantizing: Quantizing | None = None
        self.quantized: Quantizing | None = None  # what was done of `quantizing`
        self.live = False
        self.prefix: PromptPrefix | None = None
        self._reserved = 0

    @property
    def offset(self) -> int:
        """Tokens held."""
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.caches) + sum(a.nbytes for a in (*self.kept, *self.backlog))

    @property
    def caches(self) -> list[LayerCache]:
        """The target's, and behind them the heads'."""
        return [*self.layers, *self.heads]

    def copy(self) -> "PromptCache":
        """Make a cache of the same contents, at rest, that goes its own way."""
        new = copy.copy(self)
        new.layers = [copy.deepcopy(c) if c.is_mlx_lm else copy.copy(c) for c in self.layers]
        new.heads = [copy.copy(c) for c in self.heads]
        new.backlog = list(self.backlog)
        return new

    @in_turn()
    def like_new(self) -> "PromptCache":
        """Make an empty cache of the same layout; what has been quantized begins so."""
        heads = [{**c.empty_config, "start": depth} for depth, c in enumerate(self.heads)]
        kept = [self.model.no_hidden() for _ in self.kept]
        layers = from_configs([c.empty_config for c in self.layers])
        new = PromptCache(self.model, layers, from_configs(heads), self.reach, kept)
        new.quantizing = self.quantizing
        return new

    @property
    def layout(self) -> dict[str, int | None]:
        """The arguments of `make_prompt_cache` that it was made with, or is quantized with by now."""
        due = self.quantizing
        target, draft = ([c.config for c in caches if "bits" in c.config] for caches in (self.layers, self.heads))
        quantized = [*target, *draft]
        pairs = zip(self.model.windows(), self.layers, strict=True)
        rings = [c.window for window, c in pairs if window is None and c.window]
        return {
            "kv_bits": due.bits if due else target[0]["bits"] if target else None,
            "mtp_kv_bits": draft[0]["bits"] if draft else None,
            "kv_group_size": due.group_size if due else quantized[0]["group_size"] if quantized else None,
            "max_kv_size": next(iter(rings), None),
        }

    @property
    def arrays(self) -> list[mx.array]:
        """Every array of the state, for `mx.eval`."""
        return [part for c in self.caches for part in c.parts] + self.kept + self.backlog

    def begin(self, length: int) -> None:
        """Begin an answer behind a text of `length` tokens, all of which it holds or will read first."""
        for c in self.caches:
            c.context = max(context for context in CONTEXTS if context <= length)

    def reserve(self, rows: int) -> None:
        """Expect `rows` positions: buffers grow to them in one step, or to where they are to be quantized."""
        self._reserved = rows
        for c in self.layers:
            c.reserve(rows if self.quantizing is None else min(rows, self.quantizing.start))
        for c in self.heads:
            c.reserve(rows)

    def push(self, hidden: mx.array) -> None:
        """Add hidden rows for the heads to read later; those that they will not read are dropped."""
        if not self.heads:
            return
        self.backlog.append(hidden)
        if len(self.backlog) > SPILL:
            self.backlog = [mx.concatenate(self.backlog, axis=1)]
        excess = self._waiting - (self.reach or math.inf)
        if excess >= SPILL:
            self.backlog = [mx.concatenate(self.backlog, axis=1)[:, int(excess) :]]

    def pop_row(self) -> None:
        """Take the newest row out of the backlog: it is under way in a run, and comes back with `push`."""
        if self.heads:
            self.backlog[-1] = self.backlog[-1][:, :-1]

    @property
    def behind(self) -> int:
        """Rows that heads have to read when they are needed, at the end of the backlog."""
        return min(self._waiting, self.reach or self._waiting)

    @property
    def _waiting(self) -> int:
        return sum(rows.shape[1] for rows in self.backlog)

    def wake(self, base: int) -> None:
        """Let the heads, which have read all before position `base`, follow the target from now on."""
        self.to_device()
        if not self.live:
            assert self.primed == base, "rows that the heads have not read"
            self.live = True
            _seek(self.heads, mx.array([self.primed]), self.primed)

    def idle(self, base: int) -> None:
        """Let the heads stand at position `base`, all before which live heads have read."""
        if self.live:
            self.live, self.primed = False, base
            _seek(self.heads, base, base)

    def to_device(self) -> None:
        """Hand the target's position to the device, so that it can roll back there."""
        if isinstance(self.layers[0].offset, int):
            position = self.layers[0].offset
            _seek(self.layers, mx.array([position]), position)

    def to_host(self, position: int) -> None:
        """Take the target's position back from the device, where the host knows it to be `position`."""
        if not isinstance(self.layers[0].offset, int):
            _seek(self.layers, position, position)

    def rollback(self, n: mx.array) -> None:
        """Take the last n positions of the target back, for a device-side n."""
        offset = self.layers[0].offset - n
        for c in self.layers:
            c.seek(offset, c.limit)

    def advance(self, base: int) -> None:
        """Note that the run now under way began at position `base`; live heads have read all before it."""
        if self.live:
            self.primed = base

    def heads_follow(self) -> None:
        """Move the heads to where the target stands."""
        _seek(self.heads, self.layers[0].offset, self.layers[0].limit)

    def unload(self) -> CacheArrays:
        """Give out what a cycle reads and writes."""
        heads = self.heads if self.live else []
        ends = self.layers[0].offset, heads[0].offset if heads else None
        return CacheArrays(ends, [c.parts for c in (*self.layers, *heads)], self.kept if heads else [])

    def load(self, arrays: CacheArrays, limit: int, heads_limit: int) -> None:
        """Take in what `unload` gave out, and bounds of where the target and its heads now stand."""
        parts = iter(arrays.parts)
        for c in self.layers:
            c.seek(arrays.ends[0], limit)
            c.parts = next(parts)
        for c in self.heads if self.live else ():
            c.seek(arrays.ends[1], heads_limit)
            c.parts = next(parts)
        self.kept = arrays.kept if self.live else self.kept

    def mark(self) -> Mark:
        """Note the state now, in the middle of a generation, to go back to with `restore`."""
        caches = [(c, c.offset, c.limit, c.parts) for c in self.caches]
        return self._marked([c for c in self.layers if c.is_state], caches)

    def snapshot(self) -> Mark:
        """Note this moment, at rest, to go back to with `rewind` after any number of tokens."""
        assert not self.live, "a snapshot in the middle of a generation"
        return self._marked([c for c in self.caches if c.is_state or c.wraps], None)

    def _marked(self, held: list, caches: list[tuple] | None) -> Mark:
        parts = [(c, c.parts, c.start) for c in held]
        return Mark(self.offset, self.primed, self.kept, list(self.backlog), parts, caches, self.quantizing)

    def restore(self, mark: Mark) -> None:
        """Go back to a mark; where its buffers were released, later rows stay in them and are overwritten."""
        self.primed, self.kept, self.backlog = mark.primed, mark.kept, list(mark.backlog)
        self.restore_states(mark)
        if mark.caches is not None:
            for c, offset, limit, parts in mark.caches:
                c.seek(offset, limit)
                c.parts = parts
            self.layers, self.quantizing = [c for c, *_ in mark.caches[: len(self.layers)]], mark.quantizing

    def restore_states(self, mark: Mark) -> None:
        """Go back to a mark's states and wrapped windows alone."""
        for c, parts, start in mark.held:
            c.parts, c.start = parts, start

    def rewind(self, to: Mark) -> None:
        """Forget the tokens since a snapshot; those before it must be the same, so must be the caches' kind."""
        assert to.length <= self.offset, "a snapshot of another conversation"
        self.restore(to)
        self.settle(self.tokens[: to.length])

    def is_trimmable(self) -> bool:
        """Tell whether `trim` can forget any tokens: not of a state, and not once a window has wrapped."""
        return all(c.trims for c in self.caches)

    @in_turn()
    def trim(self, n: int) -> int:
        """Forget the last n tokens, or all; return how many, 0 where that cannot be.

        A head may keep one row that it read with the token behind it, now forgotten: no text depends on it.
        """
        n = min(n, self.offset)
        if n <= 0 or not self.is_trimmable():
            return 0
        left, waiting = self.offset - n, max(0, self._waiting - n)
        self.backlog = [mx.concatenate(self.backlog, axis=1)[:, :waiting]] if waiting else []
        self.primed, self.prefix = min(self.primed, left), None
        self.settle(self.tokens[:left])
        return n

    def room(self, position: int) -> float:
        """Count the rows that one call may read from `position` on: none past a start of quantizing that is due."""
        return math.inf if self.quantizing is None else self.quantizing.start - position

    @property
    def is_mlx_lm(self) -> bool:
        """Whether the target's caches are mlx-lm's own, on which nothing is built ahead or drafted."""
        return any(c.is_mlx_lm for c in self.layers)

    @property
    def rewinds(self) -> bool:
        """Whether the target can step back to a snapshot: always, but for mlx-lm's own caches."""
        return all(c.rewinds for c in self.layers)

    def needs_host(self, position: int, rows: int) -> str | None:
        """Say why a cycle of `rows` rows from `position` on cannot be built before it is known to be wanted."""
        if self.is_mlx_lm:
            return "caches that cannot step back"
        return "quantizing the caches" if self.room(position) < rows else None

    def quantize_at(self, position: int) -> None:
        """Quantize the target's caches if that is due before `position` is read."""
        due = self.quantizing
        if due is not None and position >= due.start:
            self.layers = [c.to_quantized(due.bits, due.group_size) for c in self.layers]
            self.quantizing, self.quantized = None, due
            self.reserve(self._reserved)

    def settle(self, tokens: list[int]) -> None:
        """Come to rest holding `tokens`: every position is a host integer again."""
        self.tokens, self.live = tokens, False
        _seek(self.layers, len(tokens), len(tokens))
        _seek(self.heads, self.primed, self.primed)


def _seek(caches: list, offset: int | mx.array, limit: int) -> None:
    for c in caches:
        c.seek(offset, limit)


@in_turn()
def make_prompt_cache(
    model: CachedModel,
    *,
    num_draft_tokens: int | None = None,
    kv_bits: int | None = None,
    mtp_kv_bits: int | None = None,
    kv_group_size: int | None = None,
    quantized_kv_start: int = 0,
    max_kv_size: int | None = None,
) -> PromptCache:
    """Make an empty cache for `model`, with room for `num_draft_tokens` heads (None: all it has).

    kv_bits, mtp_kv_bits: bits of the target's and the heads' keys and values (None: not quantized). The attention
        kernel, and with it a row's bits whatever is drafted, is for None, 4 and 8.
    kv_group_size: 32, 64 or 128; None is 64, or 32 where the head size needs it.
    quantized_kv_start: with kv_bits, positions before this one are read unquantized, as in mlx-lm; the switch
        comes exactly there, so that it does not depend on drafting.
    max_kv_size: full-attention layers keep this many positions, the first SINKS and the last ones, as mlx_lm's
        rotating cache when it decodes; no kernel reads it, MLX does. Raises ValueError on a bad value.
    """
    kv_group_size = group_size_for(model) if kv_group_size is None else kv_group_size
    if kv_group_size not in GROUP_SIZES:
        raise ValueError(f"kv_group_size={kv_group_size}: allowed are 32, 64 and 128")
    for name, bits in (("kv_bits", kv_bits), ("mtp_kv_bits", mtp_kv_bits)):
        if bits not in (None, 2, 3, 4, 5, 6, 8):
            raise ValueError(f"{name}={bits}: allowed are 2, 3, 4, 5, 6, 8 and None")
        part = model.mtp[0] if model.mtp and name == "mtp_kv_bits" else model
        if bits is not None and (why := getattr(part, "NO_KV_BITS", model.NO_KV_BITS)):
            raise ValueError(f"{name}={bits}: not with {why}; allowed is None")
        head_dim = 0 if bits is None else getattr(part, "head_dim", None) or model.args.head_dim
        if head_dim % kv_group_size:
            raise ValueError(f"kv_group_size={kv_group_size}: allowed are divisors of the head size {head_dim}")
    if max_kv_size is not None and max_kv_size < 1:
        raise ValueError(f"max_kv_size={max_kv_size}: allowed is 1 or more")
    if max_kv_size is not None and MlxLmCaches in model.windows():
        raise ValueError(f"max_kv_size={max_kv_size}: not with {model.NO_KV_BITS}; allowed is None")
    full = None if max_kv_size is None else Ring(max_kv_size, keep=min(SINKS, max_kv_size - 1))
    windows, heads = [window or full for window in model.windows()], model.head_windows()
    if num_draft_tokens is not None:
        heads = heads[:num_draft_tokens]
    later = kv_bits is not None and quantized_kv_start > 0
    target = {"bits": None if later else kv_bits, "group_size": kv_group_size}
    draft = {"bits": mtp_kv_bits, "group_size": kv_group_size}
    cache = PromptCache(
        model,
        make_caches(windows, starts=[0] * len(windows), **target),
        make_caches(heads, starts=list(range(len(heads))), **draft),
        None if None in heads else min(AT_FIRST, sum(window for window in heads if window)),
        [model.no_hidden() for _ in heads[1:]],
    )
    if later and kv_bits:
        cache.quantizing = Quantizing(quantized_kv_start, kv_bits, kv_group_size)
    return cache


def group_size_for(model: CachedModel) -> int:
    """Find the largest usual group size that quantized keys and values of `model` can have, else 64."""
    head_dim = getattr(getattr(model, "args", None), "head_dim", None) or 64  # latent attention quantizes nothing
    return next((size for size in (64, 32) if head_dim % size == 0), 64)
