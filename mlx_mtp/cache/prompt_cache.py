"""Hold the state of one conversation: the target's caches, its MTP heads' caches, and what joins them.

Depth j's slot p (see `decoding/drafters/heads.py`) lives at position p + j of its cache, so every cache counts
positions alike: position i of depth j reads token x_{i+1}, and all heads stand at the same offset, `primed`.
"""

import copy
import math
from typing import Any, NamedTuple

import mlx.core as mx

from ..machine.stream import in_turn
from .absorb import absorb, reach_of
from .kinds import from_configs, make_caches
from .kv_format import check_layout, group_size_for
from .layer_cache import CONTEXTS, CachedModel, LayerCache
from .mark import Mark, Quantizing
from .mlx_lm_caches import ListOfOne
from .prompt_prefix import PromptPrefix
from .ring import Ring
from .step_cache import StepCache, seek

SINKS = 4  # first positions that max_kv_size keeps, as mlx_lm's does: much attention goes there (arXiv 2309.17453)
SPILL = 16  # the backlog is joined and cut at about this many rows, not at each one


class PromptForm(NamedTuple):
    """What a step on a PromptCache depends on besides its arrays.

    context: the caches' one. layers, heads: their `config`s, no heads where they have no part, and without the starts
    of these, which are inputs.
    """

    context: int
    layers: tuple
    heads: tuple

    def made(self, model: CachedModel) -> "PromptCache":
        """Make a cache of this form that holds no arrays."""
        caches, n = from_configs([dict(config) for config in (*self.layers, *self.heads)]), len(self.layers)
        cache = PromptCache(model, caches[:n], caches[n:], None, [])
        cache.begin(self.context)
        cache.live = bool(self.heads)
        return cache


class PromptCache(StepCache, ListOfOne):
    """Caches of the target (`layers`) and of its heads (`heads`), and the tokens they hold.

    After a generation it holds every token of the conversation except the last one yielded, exactly as if the
    tokens had been decoded one by one. To go on, pass that token and what follows it as the next prompt; to go back,
    `rewind` to a `snapshot`, or `trim`.

    primed:  positions that the heads have read.
    live:    the heads follow the target, cycle by cycle; otherwise hidden rows wait in the backlog.
    backlog: the target's hidden rows [1, r, H] that they have not read yet, ending at the last position held.
    kept:    for depths 1.., the previous depth's output [1, 1, H] at position primed - 1.
    reach:   the number of last rows that heads read after a pause (`reach_of`); None for all.
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
        heads = [{**c.empty_config, "start": depth * bool(self.kept)} for depth, c in enumerate(self.heads)]
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
        absorb(self)
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
        """Let the drafter, which has read all before position `base`, follow the target from now on."""
        self.to_device()
        if not self.live:
            assert self.primed == base or not self.heads, "rows that the drafter has not read"
            self.live = True
            seek(self.heads, mx.array([self.primed]), self.primed)

    def idle(self, base: int) -> None:
        """Let the heads stand at position `base`, all before which live heads have read."""
        if self.live:
            self.live, self.primed = False, base
            seek(self.heads, base, base)

    def to_device(self) -> None:
        """Hand the target's position to the device, so that it can roll back there."""
        if isinstance(self.layers[0].offset, int):
            position = self.layers[0].offset
            seek(self.layers, mx.array([position]), position)

    def to_host(self, position: int) -> None:
        """Take the target's position back from the device, where the host knows it to be `position`."""
        if not isinstance(self.layers[0].offset, int):
            seek(self.layers, position, position)

    def advance(self, base: int) -> None:
        """Note that the run now under way began at position `base`; live heads have read all before it."""
        if self.live:
            self.primed = base

    @property
    def starts(self) -> mx.array:
        """Where the heads' caches that follow the target start, int32 [heads]."""
        return mx.array([c.start for c in self.heads] if self.live else [], mx.int32)

    @starts.setter
    def starts(self, values: mx.array) -> None:
        for i, c in enumerate(self.heads):
            c.start = values[i : i + 1]

    def form(self) -> PromptForm:
        heads = self.heads if self.live else []
        layers = tuple(tuple(c.config.items()) for c in self.layers)
        return PromptForm(
            self.layers[0].context, layers, tuple(tuple({**c.config, "start": 0}.items()) for c in heads)
        )

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
        seek(self.layers, len(tokens), len(tokens))
        seek(self.heads, self.primed, self.primed)


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
    check_layout(model, kv_bits, mtp_kv_bits, kv_group_size, max_kv_size)
    full = None if max_kv_size is None else Ring(max_kv_size, keep=min(SINKS, max_kv_size - 1))
    windows, heads = [window or full for window in model.windows()], model.head_windows()
    chained = is_chained(model)
    if num_draft_tokens is not None:
        heads = heads[:num_draft_tokens] if chained or not num_draft_tokens else heads
    later = kv_bits is not None and quantized_kv_start > 0
    target = {"bits": None if later else kv_bits, "group_size": kv_group_size}
    draft = {"bits": mtp_kv_bits, "group_size": kv_group_size}
    cache = PromptCache(
        model,
        make_caches(windows, starts=[0] * len(windows), **target),
        make_caches(heads, starts=[depth * chained for depth in range(len(heads))], **draft),
        reach_of(model, heads),
        [model.no_hidden() for _ in heads[1:] if chained],
    )
    if later and kv_bits:
        cache.quantizing = Quantizing(quantized_kv_start, kv_bits, kv_group_size)
    return cache


def is_chained(model: Any) -> bool:
    """Return whether the model's drafter has heads that read each other's outputs (`Drafter.chained`)."""
    return getattr(getattr(model, "drafter", None), "chained", True)
