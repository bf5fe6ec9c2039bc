"""Run one cycle of n texts: let the heads draft k tokens for each, verify all rows in one pass of the target, accept.

As `decoding.step`, a pure function of arrays, with a row of each for every text. All have R rows, whatever they
accept or may draft: what is drafted for one beyond its own share is verified and not accepted.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import mlx.core as mx

from ..cache.slots import gather
from ..decoding import draft as single
from ..decoding.draft_sampling import DraftChooser
from ..decoding.sampling import Picker
from ..kernels import KernelRefused
from ..layers.target import Target
from .pool import Pool, PoolArrays


class Chosen(Protocol):
    """How a text's tokens are chosen.

    plain: the likeliest, and no more is asked. tokens: those that it has. fail: is told what choosing them raised.
    """

    @property
    def plain(self) -> bool: ...

    @property
    def picker(self) -> Picker: ...

    @property
    def tokens(self) -> Sequence[int]: ...

    def fail(self, error: Exception) -> None: ...


Rows = Sequence[Chosen | None]  # by row of a pass, None where a slot is free


class Frame(NamedTuple):
    """All of a cycle that is no array, but for the keys of its texts' draws.

    pool: holds the arrays for the time of the step. k: drafts of each text. texts: by row. heads: whether they read
    the rows before. base: the first position of these, or a bound of it.
    """

    model: Target
    pool: Pool
    k: int
    texts: Rows
    heads: bool
    base: int


class Run(NamedTuple):
    """Rows that the target has verified, of n texts; as `decoding.draft.Run`.

    hidden: [n, R, H]. tokens: [n, R] int32. accepted: [n] int32, -1 in a row that is no text's. packed: tokens and
    accepted, [n, R + 1], for the host. logprobs: [R, V] by the row of a text that asks for them. The next cycle does
    without these two.
    """

    hidden: mx.array
    tokens: mx.array
    accepted: mx.array
    packed: Any = None
    logprobs: Any = None

    @property
    def size(self) -> int:
        return self.tokens.shape[1]

    @property
    def given(self) -> "Run":
        """What the next cycle gets."""
        return Run(self.hidden, self.tokens, self.accepted)


def step(frame: Frame, run: Run, arrays: PoolArrays, most: mx.array | None) -> tuple[Run, PoolArrays]:
    """Draft behind the rows of `run`, verify and accept; return the next run and the pool's arrays after it.

    most: int32 [n] of drafts that each text may accept, None for all.
    """
    model, pool, k, texts, heads, base = frame
    pool.load(arrays)
    pool.bound(base + run.size, base)
    drafts = draft(model, pool, run, k, texts) if heads else None
    rows = rows_at(run.tokens, run.accepted)
    if drafts is not None:
        rows = mx.concatenate([rows, drafts], axis=1)
    position = pool.layers[0].offset + 1
    hidden = model.hidden(rows, pool.layers)
    tokens, logprobs = pick(model, hidden, position, drafts, texts)
    accepted = mx.zeros_like(position)
    if drafts is not None:
        accepted = mx.cumprod((tokens[:, :k] == drafts).astype(mx.int32), axis=1).sum(axis=1)
    if most is not None:
        accepted = mx.minimum(accepted, most)
    if drafts is not None or most is not None:
        pool.rollback(k - accepted)
    packed = mx.concatenate([tokens, accepted[:, None]], axis=1)
    return Run(hidden, tokens, accepted, packed, logprobs), pool.unload(heads=heads)


def with_missed(pool: Pool, run: Run) -> Run:
    """Put the rows that the heads have missed in front of a run's."""
    if not pool.missed:
        return run
    hidden, tokens = zip(*pool.missed, strict=True)
    accepted, pool.missed = run.accepted + len(hidden), []
    every = mx.concatenate([*hidden, run.hidden], axis=1), mx.concatenate([*tokens, run.tokens], axis=1)
    return Run(*every, accepted)


def draft(model: Target, pool: Pool, run: Run, k: int, texts: Rows) -> mx.array | None:
    """Let all heads read the run's rows, right or not, and draft k tokens for each text: [n, k], None for no k."""
    rows, accepted, heads = run.size, run.accepted, pool.heads
    tokens, hidden, kept, drafts = run.tokens, model.capture(run.hidden), [], []
    row, first = hidden, pool.layers[0].offset + 1
    for depth, (head, kv) in enumerate(zip(model.mtp, heads, strict=False)):
        fed = rows + depth if depth < k else rows
        output = head(model.embed(tokens[:, :fed], depth), hidden[:, :fed], kv)
        feedback = head.feedback(output, hidden[:, :fed])
        if depth < k:
            answer = accepted + depth
            row = rows_at(output, answer)
            drafts.append(choose(model, depth, row, first + depth, texts))
            if depth + 1 < min(k, len(heads)):
                tokens = _put(tokens, answer + 1, drafts[-1])
        if depth + 1 < len(heads):
            hidden = mx.concatenate([pool.kept[depth], feedback], axis=1)
            kept.append(rows_at(feedback, accepted))
    pool.kept = kept
    if k > len(drafts):
        kv.seek(pool.layers[0].offset, kv.limit)  # the one head goes on right behind the accepted rows
        for depth in range(1, k):
            hidden = head.feedback(row, row)
            row = head(model.embed(drafts[-1], 0), hidden, kv)
            drafts.append(choose(model, 0, row, first + depth, texts))
    pool.heads_follow()
    return mx.concatenate(drafts, axis=1) if drafts else None


def rows_at(x: mx.array, index: mx.array) -> mx.array:
    """Take each text's row at its own index, int32 [n], of x [n, R, ...]: [n, 1, ...]."""
    if x.shape[1] == 1:
        return x
    return mx.take_along_axis(x, index.reshape(-1, *[1] * (x.ndim - 1)), axis=1)


def _put(tokens: mx.array, index: mx.array, token: mx.array) -> mx.array:
    """Put each text's `token` [n, 1] into tokens [n, R] at its own index <= R: [n, R + 1]."""
    longer = mx.concatenate([tokens, token], axis=1)
    return mx.where(mx.arange(longer.shape[1]) == index[:, None], token, longer)


def choose(model: Target, depth: int, row: mx.array, position: mx.array, texts: Rows) -> mx.array:
    """Choose the token [n, 1] at each text's position, int32 [n], that a head's output rows [n, 1, H] guess."""
    logits = model.draft_logits(depth, row)
    tokens = model.mtp[depth].token(mx.argmax(logits, axis=-1)).astype(mx.int32)
    choosers = {i: DraftChooser.of(text.picker) for i, text in enumerate(texts) if text and not text.plain}
    drawn = {i: chooser for i, chooser in choosers.items() if chooser.mode != "greedy"}
    if not drawn:
        return tokens
    rows: list[mx.array] = [*mx.split(tokens, len(texts))]
    for i, chooser in drawn.items():
        rows[i] = chooser(model, depth, row[i : i + 1], position[i : i + 1]).token.reshape(1, 1)
    return mx.concatenate(rows)


def pick(
    model: Target, hidden: mx.array, position: mx.array, drafts: mx.array | None, texts: Rows
) -> tuple[mx.array, dict[int, mx.array]]:
    """Choose the target's tokens [n, R] of hidden rows [n, R, H], each text's as alone; and logprobs asked for."""
    n, rows = hidden.shape[:2]
    choice = model.choice(hidden.reshape(1, n * rows, -1))
    others = {i: text for i, text in enumerate(texts) if text and not text.plain}
    logits = model.logits(hidden) if choice is None or len(others) == n else None
    if choice is not None and len(others) < n:
        tokens = choice.greedy().reshape(n, rows)
    else:
        assert logits is not None
        tokens = mx.argmax(logits, axis=-1).astype(mx.int32)
    if not others:
        return tokens, {}
    each: list[mx.array] = [*mx.split(tokens, n)]
    found: dict[int, mx.array] = {}
    for i, text in others.items():
        guesses = mx.array([], mx.int32) if drafts is None else drafts[i]
        at, p = position[i : i + 1], text.picker
        try:
            if choice is None and logits is not None:
                drawn, logprobs = p(logits[i], at, text.tokens, guesses)
            else:
                drawn, logprobs = p.pick(model, hidden[i : i + 1], at, text.tokens, guesses)
        except KernelRefused:
            raise
        except Exception as e:  # of a user's own sampler or processor; nobody sees this text's row
            text.fail(e)
            continue
        each[i] = drawn[None]
        if logprobs is not None:
            found[i] = logprobs
    return mx.concatenate(each), found


def row_of(run: Run, row: int, index: int, token: int) -> single.Run:
    """Cut out of a run the one row [1, 1, H] of a text that has chosen this token."""
    hidden = run.hidden[row : row + 1, index : index + 1]
    return single.Run.of(hidden, mx.array([token]), single.NONE_ACCEPTED, single.NO_DRAFTS.tokens, None)


def merged(run: Run | None, firsts: list[single.Run], index: mx.array) -> Run:
    """Put the rows of a run and of newcomers' first ones, all of as many rows, in the order of an index."""
    size = run.size if run else 1
    wide = partial(mx.pad, pad_width=[(0, 0), (0, size - 1)])
    hidden = [mx.pad(first.hidden, [(0, 0), (0, size - 1), (0, 0)]) for first in firsts]
    tokens = [wide(first.tokens[None]) for first in firsts]
    accepted = [mx.zeros(1, mx.int32) for _ in firsts]
    old = (run.hidden, run.tokens, run.accepted) if run else (None, None, None)
    found = [gather(a, b, index) for a, b in zip(old, (hidden, tokens, accepted), strict=True)]
    return Run(found[0], found[1], found[2])
