"""Compare one kernel on one shape with stock MLX: are its bits right, is it accurate enough, is it faster?"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx

from ..kernels import KernelRefused, all_ran, drop_new
from ..machine.errors import refusal

Op = Callable[[mx.array], Sequence[mx.array]]  # x [M, K] -> outputs [M, N_i]

FAILS = "fails with"  # begins what is wrong with a kernel that gave nothing
DIFFERS = "differs from one row alone"
DRAWS = 6  # two per bit of a row's number, see `_spoilt`
LAYERS = 2  # per draw, others each time
CHAINS, FASTEST = 22, 3  # of each side, and those that count
CHAIN_SECONDS = 0.001  # so a trial takes about 44 ms
CHAIN_STEPS = (2, 256)
ROUNDINGS = {2: 1, 4: 16}  # of a row that a kernel may err by, by a value's bytes: a truth in 32 bits is rounded, too
UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


class WrongKernel(Exception):
    """A kernel is wrong: how, in words."""


@dataclass(frozen=True)
class KernelTrial:
    """A kernel and what it would take the place of, at one number of rows.

    shape: all but the rows that the choice depends on, as "4096x1024 4-bit g64 bfloat16".
    rows, width, dtype: of x [M, K].
    pairs: (ours, stock) of each layer that has this shape, x [M, K] -> outputs [M, N_i].
    alone: what each layer gives for the rows one after the other, where they have positions. Else that is stock on
        single rows, and ours may not depend on the other rows.
    truth: for ops with an arithmetic of their own, each layer's result in float32. `alone` is then of ours, and the
        error may be twice that of stock; the other rows may not matter in any case.
    bits: False for ops that promise no bits, only that error.
    kind, weights: of trials of an op and kind the one that reads the most weights is timed for all; "": its shape.
    draws: of x that a check makes, 0: DRAWS, or more for more than eight rows.
    base: the key of the trial of another context that says whether the kernel is right; this one says whether it is
        faster in its own.
    split: the kernel of each layer with the rows split, where that is to be tried, too; its bits are the same.
    """

    op: str
    shape: str
    rows: int
    pairs: Sequence[tuple[Op, Op]]
    width: int
    dtype: mx.Dtype
    alone: Sequence[Op] | None = None
    truth: Sequence[Op] | None = None
    bits: bool = True
    kind: str = ""
    weights: int = 0
    draws: int = 0
    base: tuple[str, str, int] | None = None
    split: Sequence[Op] = ()

    def __post_init__(self) -> None:
        assert self.pairs, f"{self.op} {self.shape}: a trial without layers"
        assert self.bits or self.truth, f"{self.op} {self.shape}: a trial that checks nothing"

    @property
    def key(self) -> tuple[str, str, int]:
        return self.op, self.shape, self.rows

    def of_split(self) -> "KernelTrial":
        """Return the trial of the kernel with the rows split; this one where nothing is to be split."""
        pairs = [(ours, stock) for ours, (_, stock) in zip(self.split, self.pairs, strict=True)] if self.split else []
        return replace(self, pairs=pairs, split=()) if pairs else self

    def chosen(self, split: bool) -> "KernelTrial":
        """Return the trial of one alternative only: with the rows split, or not."""
        return self.of_split() if split else replace(self, split=())

    def x(self, seed: int) -> mx.array:
        """Draw normal x [M, K], the same for the same seed."""
        return mx.random.normal((self.rows, self.width), self.dtype, key=mx.random.key(seed))


def compile_kernel(trial: KernelTrial) -> None:
    """Run a kernel, for one row too where bits are its own, so that nothing later waits for its compilation."""
    ours, x = trial.pairs[0][0], trial.x(0)
    with suppress(Exception):  # which `check` gets as well, and says
        mx.eval(ours(x), ours(x[:1]) if trial.truth else None, trial.alone[0](x) if trial.alone else None)
        all_ran()


def check(trial: KernelTrial, seed: int = 0) -> str | None:
    """Say why the kernel is wrong, or None where each row has the bits it has alone and, if need be, is accurate.

    Several draws of x, on several layers, also with NaN and infinity in rows that the others must not depend on.
    An exception of the kernel is a reason too; one of stock MLX is raised.
    """
    layers, count = len(trial.pairs), (trial.draws or max(DRAWS, 2 * (trial.rows - 1).bit_length())) * LAYERS
    try:
        for i in range(count):
            layer = i % layers if layers < count else i * layers // count  # far apart, or in turn
            draw = i // LAYERS
            x = trial.x(seed * DRAWS + draw)
            if trial.bits:
                _check_bits(trial, layer, x, draw)
            if trial.truth is not None:
                _check_error(*trial.pairs[layer], trial.truth[layer], x)
    except WrongKernel as e:
        return str(e)
    return None


def _check_bits(trial: KernelTrial, layer: int, x: mx.array, draw: int) -> None:
    """Raise WrongKernel where bits of one layer are wrong, given x or given x with some rows spoilt."""
    ours, stock = trial.pairs[layer]
    alone = trial.alone[layer] if trial.alone else partial(_row_by_row, ours if trial.truth else stock)
    expected = _of_kernel(alone, x) if trial.truth else alone(x)
    mx.eval(expected)
    every, spoilt = range(trial.rows), _spoilt(trial.rows, draw)
    name, value = (("NaN", math.nan), ("infinity", math.inf))[draw % 2]
    spoilt_x = mx.where(mx.array(spoilt)[:, None], value, x)
    clean = [] if trial.alone and not trial.truth else [i for i in every if not spoilt[i]]
    _compare(ours, x, expected, every, DIFFERS)
    _compare(ours, spoilt_x, expected, clean, f"changes with {name} in another row")


def _check_error(ours: Op, stock: Op, truth: Op, x: mx.array) -> None:
    """Raise WrongKernel where a row errs more than twice as much as stock MLX's, and by more than ROUNDINGS."""
    exact = [y.astype(mx.float32) for y in truth(x)]
    for y, theirs, t in zip(_of_kernel(ours, x), stock(x), exact, strict=True):
        roundings = ROUNDINGS[y.dtype.size] * mx.finfo(y.dtype).eps * _rms(t)
        errors, allowed = _rms(y - t), mx.maximum(2 * _rms(theirs - t), roundings)
        for i, (error, most) in enumerate(zip(errors.tolist(), allowed.tolist(), strict=True)):  # type: ignore
            if not error <= most:
                raise WrongKernel(f"row {i + 1} of {len(x)} errs by {error:.2g} where {most:.2g} is allowed")


def _rms(x: mx.array) -> mx.array:
    """Take the root mean square of each row [M, ..]: [M]."""
    return mx.sqrt(mx.mean(mx.square(x.astype(mx.float32)).reshape(len(x), -1), axis=1))


def _row_by_row(op: Op, x: mx.array) -> list[mx.array]:
    rows = [op(x[i : i + 1]) for i in range(len(x))]
    return [mx.concatenate(list(parts)) for parts in zip(*rows, strict=True)]


def _of_kernel(ours: Op, x: mx.array) -> list[mx.array]:
    """Compute a kernel's outputs; raises WrongKernel where it fails."""
    try:
        found = list(ours(x))
        mx.eval(found)
    except Exception as e:
        drop_new()
        raise WrongKernel(failing(e)) from e
    all_ran()
    return found


def failing(e: Exception) -> str:
    """Say what is wrong with a kernel that gave nothing but an exception."""
    return f"{FAILS} {refusal(e.refusals[0].error if isinstance(e, KernelRefused) and e.refusals else e)}"


def _spoilt(rows: int, draw: int) -> list[bool]:
    """Tell which rows a draw spoils: of any two some draw of `check` spoils the one and not the other."""
    return [(i >> draw // 2) % 2 == draw % 2 for i in range(rows)]


def _compare(ours: Op, x: mx.array, expected: Sequence[mx.array], rows: Sequence[int], how: str) -> None:
    """Raise WrongKernel where one of these rows of ours(x) has other bits than expected; `how` says it of a row."""
    found = _of_kernel(ours, x)
    kinds = [[(a.shape, str(a.dtype)) for a in arrays] for arrays in (found, expected)]
    if kinds[0] != kinds[1]:
        raise WrongKernel(f"gives {kinds[0]} where stock MLX gives {kinds[1]}")
    pairs = zip(found, expected, strict=True)
    differs = [mx.any(_differs(a, b).reshape(len(x), -1), axis=1) for a, b in pairs]
    wrong: list[bool] = mx.any(mx.stack(differs), axis=0).tolist()  # type: ignore[assignment]
    for i in rows:
        if wrong[i]:
            raise WrongKernel(f"row {i + 1} of {len(x)} {how}")


def _differs(a: mx.array, b: mx.array) -> mx.array:
    """Tell where bits differ; a NaN is a NaN, whose sign and payload no arithmetic promises."""
    bits = UNSIGNED[a.dtype.size]
    return (a.view(bits) != b.view(bits)) & ~(mx.isnan(a) & mx.isnan(b))


def time_pair(trial: KernelTrial) -> float:
    """Measure stock MLX's time over the kernel's, in an interleaved A/B.

    Both run as chains in which each step waits for all outputs of the one before, through as many equal launches as
    there are outputs: their time is in both, and moves the ratio towards 1. Other work on the machine only ever adds
    time, so the fastest chains of each are compared: on a busy machine a median follows the disturbance.
    """
    x = trial.x(0)
    sides = tuple(zip(*trial.pairs, strict=True))
    few = min(len(trial.pairs), 8)
    for side in sides:
        _chain_seconds(side, x, 0, few)  # compiles
    slower = max(_chain_seconds(side, x, 0, few) for side in sides)
    least, most = CHAIN_STEPS
    steps = max(least, min(most, round(CHAIN_SECONDS * few / slower)))
    spent: tuple[list[float], list[float]] = ([], [])
    start = 0
    for i in range(CHAINS):
        for side in (0, 1) if i % 2 else (1, 0):
            spent[side].append(_chain_seconds(sides[side], x, start, steps))
            start += steps  # not what the other has just read into caches
    ours, stock = (sum(sorted(times)[:FASTEST]) for times in spent)
    return stock / ours


def _chain_seconds(ops: Sequence[Op], x: mx.array, start: int, steps: int) -> float:
    """Time `steps` layers from `start` on, in seconds, each after the one before."""
    for i in range(start, start + steps):
        for y in ops[i % len(ops)](x):
            # Never true, of NaN neither: x stays what it is, but has to wait for y.
            x = mx.where(y.reshape(len(x), -1)[:, :1] < -math.inf, 0, x)
    mx.synchronize()
    tic = time.perf_counter()
    mx.eval(x)
    mx.synchronize()
    return time.perf_counter() - tic
