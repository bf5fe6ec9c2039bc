"""Hold the state of one conversation: the caches of the target and of its MTP heads.

All caches count positions alike. The head of depth j has no slot before position j; at position i it reads the token
at i + 1 (see `decoding/drafters/heads.py`), and all heads have the same offset, `primed`.
"""

import copy
import math
from typing import Any, NamedTuple

import mlx.core as mx

from ..machine.stream import in_turn
from .aside import reunite
from .drafting import no_kept, pending, starts_of
from .kinds import from_configs, layout_of
from .layer_cache import CONTEXTS, CachedModel, LayerCache
from .mark import Mark, Quantizing
from .mlx_lm_caches import ListOfOne
from .prompt_prefix import PromptPrefix
from .step_cache import StepCache, seek
from .token_rows import TokenRows

SPILL = 16  # rows after which the backlog is joined and cut; doing so at each row is slower


class PromptForm(NamedTuple):
    """Everything besides arrays that a step on a PromptCache depends on.

    context: of the caches. layers, heads: their `config`s; no heads if they are not in the step, and heads without
    `start`, which is an input. shifted: whether `next_shift` is not 0; the shift itself is an input.
    """

    context: int
    layers: tuple
    heads: tuple
    shifted: bool = False

    def made(self, model: CachedModel) -> "PromptCache":
        """Return a cache of this form without arrays."""
        caches, n = from_configs([dict(config) for config in (*self.layers, *self.heads)]), len(self.layers)
        cache = PromptCache(model, caches[:n], caches[n:], None, [])
        cache.begin(self.context)
        cache.live = bool(self.heads)
        return cache


class PromptCache(TokenRows, StepCache, ListOfOne):
    """The caches of the target (`layers`) and of its heads (`heads`), and the tokens they hold.

    After a generation it holds every token of the conversation except the last one yielded, as if each had been
    decoded alone. To continue, pass that token and the following ones as the next prompt; to go back, `trim`, or
    `rewind` to a `snapshot`.

    primed:  number of positions that the heads have read. live: they follow the target in each cycle.
    backlog: `drafting.pending` rows that the heads have not read and need, up to the last position held.
    kept:    per depth from 1 on, the previous depth's output [1, 1, H] at position primed - 1; or a drafter's own.
    aside:   the drafter's first caches and their `kept`, while it drafts without them (`aside.py`); None at rest.
    reach:   number of last rows that heads read after a pause, by `reach_of`; None for all.
    adapter: digest of the adapter that its tokens were read with, "" for none, None before a generation.
    prefix:  the prompt whose tokens it holds, if `mlx-mtp cache-prompt` created it.
    """

    def __init__(
        self, model: CachedModel, layers: list[Any], heads: list[Any], reach: int | None, kept: list[mx.array]
    ):
        super().__init__()
        self.model, self.layers, self.heads, self.reach = model, layers, heads, reach
        self.primed = 0
        self.backlog: list[mx.array] = []
        self.kept = kept
        self.quantizing: Quantizing | None = None
        self.quantized: Quantizing | None = None  # the request that has been carried out
        self.live, self.aside = False, None
        self.adapter: str | None = None
        self.prefix: PromptPrefix | None = None
        self._reserved = 0

    @property
    def nbytes(self) -> int:
        return sum(c.nbytes for c in self.caches) + sum(a.nbytes for a in (*self.kept, *self.backlog))

    @property
    def caches(self) -> list[LayerCache]:
        """The target's caches, then the heads'."""
        return [*self.layers, *(self.aside[0] if self.aside else ()), *self.heads]

    def copy(self) -> "PromptCache":
        """Return an independent cache with the same contents; only between generations."""
        new = copy.copy(self)
        new.layers = [copy.deepcopy(c) if c.is_mlx_lm else copy.copy(c) for c in self.layers]
        new.heads = [copy.copy(c) for c in self.heads]
        new.backlog = list(self.backlog)
        return new

    @in_turn()
    def like_new(self) -> "PromptCache":
        """Return an empty cache of the same layout; layers that have been quantized start quantized."""
        starts = starts_of(self.model, len(self.heads))
        heads = [{**c.empty_config, "start": start} for c, start in zip(self.heads, starts, strict=True)]
        layers = from_configs([c.empty_config for c in self.layers])
        new = PromptCache(self.model, layers, from_configs(heads), self.reach, no_kept(self.model, len(heads)))
        new.quantizing = self.quantizing
        return new

    @property
    def layout(self) -> dict[str, int | None]:
        """A dict of kv_bits, mtp_kv_bits, kv_group_size and max_kv_size: arguments of `make_prompt_cache`."""
        return layout_of(self)

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays, for `mx.eval`."""
        return [part for c in self.caches for part in c.parts] + self.kept + self.backlog

    def begin(self, length: int) -> None:
        """Set the `context` of all caches for an answer that begins after `length` tokens."""
        for c in self.caches:
            c.context = max(context for context in CONTEXTS if context <= length)

    def reserve(self, rows: int) -> None:
        """Let the next growth of buffers reach `rows` positions, at most that where they are quantized."""
        self._reserved = rows
        for c in self.layers:
            c.reserve(rows if self.quantizing is None else min(rows, self.quantizing.start))
        for c in self.heads:
            c.reserve(rows)

    def push(self, hidden: mx.array) -> None:
        """Append hidden rows [1, r, H] to the backlog, if there are heads; drop older ones that are not needed."""
        if not self.heads:
            return
        self.backlog.append(pending(self.model, hidden))
        if len(self.backlog) > SPILL:
            self.backlog = [mx.concatenate(self.backlog, axis=1)]
        excess = self._pending - (self.reach or math.inf)
        if excess >= SPILL:
            self.backlog = [mx.concatenate(self.backlog, axis=1)[:, int(excess) :]]

    def pop_row(self) -> None:
        """Remove the newest row from the backlog; the next run contains it, and `push` adds it again."""
        if self.heads:
            self.backlog[-1] = self.backlog[-1][:, :-1]

    def resume_heads(self, base: int) -> None:
        """Let the drafter, which has read all before `base`, follow the target; positions move to the device."""
        self.to_device()
        if not self.live:
            assert self.primed == base or not self.heads, "the drafter has not read all rows"
            self.live = True
            seek(self.heads, mx.array([self.primed]), self.primed)

    def pause_heads(self, base: int) -> None:
        """Stop a live drafter at position `base`, or where caches were set aside; all have read the rows before."""
        if self.live:
            self.live, self.primed = False, self.primed if self.aside else base
            reunite(self)
            seek(self.heads, self.primed, self.primed)

    def to_device(self) -> None:
        """Move the target's position to the device, where it can be rolled back."""
        if isinstance(self.layers[0].offset, int):
            position = self.layers[0].offset
            seek(self.layers, mx.array([position]), position)

    def to_host(self, position: int) -> None:
        """Set the target's position to the host integer `position`, which equals the device's."""
        if not isinstance(self.layers[0].offset, int):
            seek(self.layers, position, position)

    def advance(self, base: int) -> None:
        """Note that a run begins at position `base`: live heads, if none are aside, have read all before it."""
        if self.live and not self.aside:
            self.primed = base

    @property
    def starts(self) -> mx.array:
        """`start` of the heads' caches that follow the target, int32 [heads]."""
        return mx.array([c.start for c in self.heads] if self.live else [], mx.int32)

    @starts.setter
    def starts(self, values: mx.array) -> None:
        for i, c in enumerate(self.heads):
            c.start = values[i : i + 1]

    def form(self) -> PromptForm:
        heads = self.heads if self.live else []
        layers = tuple(tuple(c.config.items()) for c in self.layers)
        heads = tuple(tuple({**c.config, "start": 0}.items()) for c in heads)
        return PromptForm(self.layers[0].context, layers, heads, bool(self.next_shift))

    def mark(self) -> Mark:
        """Return a mark of the state during a generation, for `restore`."""
        caches = [(c, c.offset, c.limit, c.parts, c.fresh) for c in self.caches]
        return self._marked([c for c in self.layers if c.is_state], caches)

    def snapshot(self) -> Mark:
        """Return a mark of the state between generations, for `rewind` after any number of tokens."""
        assert not self.live, "a snapshot in the middle of a generation"
        return self._marked([c for c in self.caches if c.is_state or c.wraps], None)

    def _marked(self, held: list, caches: list[tuple] | None) -> Mark:
        parts = [(c, c.parts, c.start) for c in held]
        heads = self.live, self.primed, self.kept, list(self.backlog), self.heads, self.aside
        return Mark(self.offset, *heads, parts, caches, self.quantizing)

    def restore(self, mark: Mark) -> None:
        """Return to a mark.

        After its `release`, and to a snapshot, only `held` and the heads' fields return: the caller then sets
        positions (`settle`), and later rows stay in the buffers to be overwritten. `tokens` never change here.
        """
        self.live, self.primed, self.kept, self.backlog = mark.live, mark.primed, mark.kept, list(mark.backlog)
        self.heads, self.aside = mark.heads, mark.aside
        self.restore_states(mark)
        if mark.caches is not None:
            for c, offset, limit, parts, fresh in mark.caches:
                c.fresh = ()
                c.seek(offset, limit)
                c.parts, c.fresh = parts, fresh
            self.layers, self.quantizing = [c for c, *_ in mark.caches[: len(self.layers)]], mark.quantizing

    def restore_states(self, mark: Mark) -> None:
        """Restore the recurrent states and rings that a mark holds (`held`), nothing else."""
        for c, parts, start in mark.held:
            c.parts, c.start = parts, start

    def rewind(self, to: Mark) -> None:
        """Drop the tokens since a snapshot; the tokens before it and the kinds of caches must not have changed."""
        assert to.length <= self.offset, "a snapshot of another conversation"
        self.restore(to)
        self.settle(self.tokens[: to.length])

    def room(self, position: int) -> float:
        """Return the number of rows that can be read from `position` before caches are quantized, or infinity."""
        return math.inf if self.quantizing is None else self.quantizing.start - position

    @property
    def is_mlx_lm(self) -> bool:
        """Whether the target's caches are mlx-lm's own, without drafts or cycles built ahead."""
        return any(c.is_mlx_lm for c in self.layers)

    @property
    def rewinds(self) -> bool:
        """Whether the target can return to a snapshot; False for some of mlx-lm's own caches."""
        return all(c.rewinds for c in self.layers)

    def needs_host(self, position: int, rows: int) -> str | None:
        """Return why a cycle of `rows` rows at `position` cannot be built ahead, None if it can."""
        if self.is_mlx_lm:
            return "caches that cannot step back"
        return "quantizing the caches" if self.room(position) < rows else None

    def quantize_at(self, position: int) -> None:
        """Quantize the target's caches if `position`, which is read next, has reached the requested start."""
        due = self.quantizing
        if due is not None and position >= due.start:
            self.layers = [c.to_quantized(due.bits, due.group_size) for c in self.layers]
            self.quantizing, self.quantized = None, due
            self.reserve(self._reserved)
            self.place_rows()

    def settle(self, tokens: list[int]) -> None:
        """Rest the cache with these tokens held: positions are host integers (heads: `primed`), the heads paused."""
        self.tokens, self.live = tokens, False
        reunite(self)
        for caches, held in ((self.layers, len(tokens)), (self.heads, self.primed)):
            seek(caches, held, held)
