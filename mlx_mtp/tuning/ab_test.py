"""Compare a kernel on one shape with MLX's own operations: their bits, its error and its speed."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import mean

import mlx.core as mx

from ..kernels import KernelRefused, all_ran, drop_new, matrix_rows, padded
from ..machine.errors import refusal

TimedOp = Callable[[mx.array], Sequence[mx.array]]  # x [M, K] -> outputs [M, N_i]

FAILS = "fails with"  # prefix of the reason of a kernel that raised
DIFFERS = "differs from one row alone"
DRAWS = 6  # inputs per check: two per bit of a row's index, see `_spoiled`
LAYERS = 2  # layers checked per draw
CHAINS, FASTEST = 22, 3  # chains timed per side, and the number of fastest ones that are compared
CHAIN_SECONDS = 0.001  # per chain, so a trial takes about 44 ms
CHAIN_STEPS = (2, 256)  # minimum and maximum
ROUNDINGS = {2: 1, 4: 16}  # allowed error in roundings, by bytes per value; a truth in 32 bits is rounded too
UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


class WrongKernel(Exception):
    """Raised with the reason for which a kernel is wrong."""


@dataclass(frozen=True)
class KernelTrial:
    """A kernel and the MLX operations that it may replace, at one number of rows.

    shape: everything but the rows that decides which is faster, as "4096x1024 4-bit g64 bfloat16".
    rows, width, dtype: of x [M, K].
    pairs: (kernel, MLX's operations) of each layer of this shape, each x [M, K] -> outputs [M, N_i].
    alone: per layer the expected outputs of the rows one by one, if they have positions. The default is MLX's on
        single rows; rows of the kernel must then not depend on each other.
    truth: per layer the result in float32, for ops with their own arithmetic. `alone` then defaults to the kernel on
        single rows, and the kernel's error may be twice that of MLX, or ROUNDINGS roundings.
    untimed: whether the kernel is on if it is right, because the lane of its bits was chosen for all of them.
    kind, weights: trials of one op and kind (default: shape) with the same compiled row count share a kernel. Of
        these the one with the maximum row count, then weights, is timed for all.
    draws: number of inputs x of a check; 0 for the default, which is DRAWS, and more above eight rows.
    base: key of the trial that this one repeats in another context: if that finds the kernel wrong, it is off here.
    split: per layer the kernel with the rows split, if that is an alternative; its bits are the same.
    """

    op: str
    shape: str
    rows: int
    pairs: Sequence[tuple[TimedOp, TimedOp]]
    width: int
    dtype: mx.Dtype
    alone: Sequence[TimedOp] | None = None
    truth: Sequence[TimedOp] | None = None
    untimed: bool = False
    kind: str = ""
    weights: int = 0
    draws: int = 0
    base: tuple[str, str, int] | None = None
    split: Sequence[TimedOp] = ()

    def __post_init__(self) -> None:
        assert self.pairs, f"{self.op} {self.shape}: a trial without layers"

    @property
    def key(self) -> tuple[str, str, int]:
        return self.op, self.shape, self.rows

    @property
    def compiled_rows(self) -> int:
        """The row count of the compiled kernel that runs these rows."""
        return matrix_rows(self.rows) if self.untimed else padded(self.rows)

    def of_split(self) -> "KernelTrial":
        """Return the trial of the kernel that splits the rows, or this trial if there is no such kernel."""
        pairs = [(ours, stock) for ours, (_, stock) in zip(self.split, self.pairs, strict=True)] if self.split else []
        return replace(self, pairs=pairs, split=()) if pairs else self

    def chosen(self, split: bool) -> "KernelTrial":
        """Return the trial of one alternative alone, the rows split or not; not split if there is no such kernel."""
        return self.of_split() if split else replace(self, split=())

    def x(self, seed: int) -> mx.array:
        """Return x [M, K], normally distributed and determined by the seed."""
        return mx.random.normal((self.rows, self.width), self.dtype, key=mx.random.key(seed))


def compile_kernel(trial: KernelTrial) -> None:
    """Run a kernel on the first layer, so that it is compiled; exceptions are suppressed, because `check` finds them.

    With a truth also on one row. `alone`, if given, is run, too; MLX's operations and split rows are not.
    """
    ours, x = trial.pairs[0][0], trial.x(0)
    with suppress(Exception):  # `check` raises it again and reports it
        mx.eval(ours(x), ours(x[:1]) if trial.truth else None, trial.alone[0](x) if trial.alone else None)
        all_ran()


def check(trial: KernelTrial, seed: int = 0) -> str | None:
    """Return why the kernel is wrong; None if its rows have the expected bits and, with a truth, are accurate.

    Checks several x, determined by the seed, on several layers, also with NaN and infinity in other rows. An
    exception of the kernel is a reason; one of MLX's operations is raised.
    """
    layers, count = len(trial.pairs), (trial.draws or max(DRAWS, 2 * (trial.rows - 1).bit_length())) * LAYERS
    try:
        for i in range(count):
            layer = i % layers if layers < count else i * layers // count  # far apart, or in turn
            draw = i // LAYERS
            x = trial.x(seed * DRAWS + draw)
            _check_bits(trial, layer, x, draw)
            if trial.truth is not None:
                _check_error(*trial.pairs[layer], trial.truth[layer], x)
    except WrongKernel as e:
        return str(e)
    return None


def _check_bits(trial: KernelTrial, layer: int, x: mx.array, draw: int) -> None:
    """Raise WrongKernel if bits of a layer are wrong for x, or for x with NaN or infinity in other rows.

    With `alone` and no truth, rows may depend on each other: of the outputs for NaN and infinity only shapes and
    types are then checked.
    """
    ours, stock = trial.pairs[layer]
    alone = trial.alone[layer] if trial.alone else partial(_row_by_row, ours if trial.truth else stock)
    expected = outputs_of(alone, x) if trial.truth else alone(x)
    mx.eval(expected)
    every, spoiled = range(trial.rows), _spoiled(trial.rows, draw)
    name, value = (("NaN", math.nan), ("infinity", math.inf))[draw % 2]
    spoiled_x = mx.where(mx.array(spoiled)[:, None], value, x)
    clean = [] if trial.alone and not trial.truth else [i for i in every if not spoiled[i]]
    _compare(ours, x, expected, every, DIFFERS)
    _compare(ours, spoiled_x, expected, clean, f"changes with {name} in another row")


def _check_error(ours: TimedOp, stock: TimedOp, truth: TimedOp, x: mx.array) -> None:
    """Raise WrongKernel if a row's error is NaN, or exceeds both twice that of MLX and ROUNDINGS roundings.

    Errors are root mean squares over the row, against the result in float32 of `truth`.
    """
    exact = [y.astype(mx.float32) for y in outputs_of(truth, x)]
    for y, stock_y, t in zip(outputs_of(ours, x), stock(x), exact, strict=True):
        roundings = ROUNDINGS[y.dtype.size] * mx.finfo(y.dtype).eps * _rms(t)
        errors, limits = _rms(y - t), mx.maximum(2 * _rms(stock_y - t), roundings)
        for i, (error, limit) in enumerate(zip(errors.tolist(), limits.tolist(), strict=True)):  # type: ignore
            if not error <= limit:
                raise WrongKernel(f"row {i + 1} of {len(x)} errs by {error:.2g} where {limit:.2g} is allowed")


def _rms(x: mx.array) -> mx.array:
    """Return the root mean square of each row of x [M, ...]: [M]."""
    return mx.sqrt(mx.mean(mx.square(x.astype(mx.float32)).reshape(len(x), -1), axis=1))


def _row_by_row(op: TimedOp, x: mx.array) -> list[mx.array]:
    rows = [op(x[i : i + 1]) for i in range(len(x))]
    return [mx.concatenate(list(parts)) for parts in zip(*rows, strict=True)]


def outputs_of(ours: TimedOp, x: mx.array) -> list[mx.array]:
    """Return a kernel's outputs, evaluated; raises WrongKernel if it raises."""
    try:
        outputs = list(ours(x))
        mx.eval(outputs)
    except Exception as e:
        drop_new()
        raise WrongKernel(failing(e)) from e
    all_ran()
    return outputs


def failing(e: Exception) -> str:
    """Return "fails with" and an exception in one line; for KernelRefused, the error of the first refused launch."""
    return f"{FAILS} {refusal(e.refusals[0].error if isinstance(e, KernelRefused) and e.refusals else e)}"


def _spoiled(rows: int, draw: int) -> list[bool]:
    """Return which rows a draw spoils; for any two rows, some draw spoils the first and not the second."""
    return [(i >> draw // 2) % 2 == draw % 2 for i in range(rows)]


def _compare(ours: TimedOp, x: mx.array, expected: Sequence[mx.array], rows: Sequence[int], how: str) -> None:
    """Raise WrongKernel if ours(x) raises, has other shapes or types than expected, or one of `rows` other bits.

    Any two NaN are equal. how: the text after "row 2 of 4" in the message.
    """
    outputs = outputs_of(ours, x)
    kinds = [[(a.shape, str(a.dtype)) for a in arrays] for arrays in (outputs, expected)]
    if kinds[0] != kinds[1]:
        raise WrongKernel(f"gives {kinds[0]} where {kinds[1]} is expected")
    differs = []
    for a, b in zip(outputs, expected, strict=True):
        bits = UNSIGNED[a.dtype.size]
        unequal = (a.view(bits) != b.view(bits)) & ~(mx.isnan(a) & mx.isnan(b))  # any two NaN are equal
        differs.append(mx.any(unequal.reshape(len(x), -1), axis=1))
    wrong: list[bool] = mx.any(mx.stack(differs), axis=0).tolist()  # type: ignore[assignment]
    for i in rows:
        if wrong[i]:
            raise WrongKernel(f"row {i + 1} of {len(x)} {how}")


def time_pair(trial: KernelTrial) -> float:
    """Return the time of MLX's operations over that of the kernel, measured in alternating chains.

    Each step of a chain depends on all outputs of the previous one through one extra launch per output, which moves
    the ratio towards 1. The fastest chains are compared, because other work on the machine only adds time.
    """
    x = trial.x(0)
    ours, stock = chain_times([(side, x) for side in zip(*trial.pairs, strict=True)])
    return stock / ours


def chain_times(sides: Sequence[tuple[Sequence[TimedOp], mx.array]], budget: float = math.inf) -> list[float]:
    """Return the seconds of an op of each side, measured in alternating chains, the mean of the fastest.

    sides: the op of each layer, and its x. budget: seconds after which no further round of chains begins.
    """
    probe, end = min(len(sides[0][0]), 8), time.perf_counter() + budget
    for side in sides:
        _chain_seconds(*side, 0, probe)  # compiles
    slowest = max(_chain_seconds(*side, 0, probe) for side in sides)
    shortest, longest = CHAIN_STEPS
    steps = max(shortest, min(longest, round(CHAIN_SECONDS * probe / slowest)))
    spent: list[list[float]] = [[] for _ in sides]
    start = 0
    for i in range(CHAINS):
        if i and time.perf_counter() >= end:
            break
        for side in range(len(sides)) if i % 2 else reversed(range(len(sides))):
            spent[side].append(_chain_seconds(*sides[side], start, steps))
            start += steps  # other layers, whose weights are not in a cache
    return [mean(sorted(times)[:FASTEST]) / steps for times in spent]


def _chain_seconds(ops: Sequence[TimedOp], x: mx.array, start: int, steps: int) -> float:
    """Run a chain of `steps` ops on x, one per layer, from index `start` on and cyclically; return its seconds.

    Each op depends on the outputs of the previous one. Building the graph is not timed.
    """
    for i in range(start, start + steps):
        for y in ops[i % len(ops)](x):
            # The condition is never true, nor for NaN: x keeps its values but depends on y.
            x = mx.where(y.reshape(len(x), -1)[:, :1] < -math.inf, 0, x)
    mx.synchronize()
    tic = time.perf_counter()
    mx.eval(x)
    mx.synchronize()
    return time.perf_counter() - tic
