"""Check each kernel in the emulator on a small shape against MLX's own kernels from the installed wheel.

MLX's kernel for one row of a quantized or dense product is emulated too. The wheel has no sources of its norms, RoPE,
sigmoids and convolution; kernels built from these are compared with float32 on the CPU, by error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import mlx.core as mx

from ..emulator import emulated, stock
from ..tuning.ab_test import KernelTrial, check
from ..tuning.kernel_switch import trials
from .doctor_summary import launched
from .kernels import asked
from .kernels_cases import SMALL

ROWS, POSITIONS = 4, 128  # of the sample; fewer rows if a kernel serves fewer
DRAWS = 2  # of a check, with NaN and with infinity in other rows
TRIES = 5  # draws whose errors are compared
BITS, OWN_BITS, ERROR = "MLX's bits", "bits of a row alone, and error", "error"
# Ops that the wheel covers only in part: the number of roundings by which their values may err.
CHAINED = {"verify_glu": 4, "gated_delta_verify": 8, "norm_rope": 4, "add_norm": 2}


def of_op(op: str) -> dict[str, Any]:
    """Check an op's kernel, emulated, on its small shape, and count the memory traffic of a call.

    wrong: what is wrong, or None. against: the reference that it is compared with.
    """
    site: Any = SMALL[op]()
    if op == "verify_latent_attention":  # the slowest to emulate
        site.OFFSET, site.SLOTS = POSITIONS - 8, POSITIONS
    rows = ROWS if ROWS in site.candidates else min(site.candidates)
    trial, *_ = (
        replace(t, draws=DRAWS) for t in trials([site], mx.bfloat16) if t.rows == rows
    )  # with a short context
    if op == "verify_gemv":
        trial = replace(trial, pairs=[(site.ours, lambda x: [stock.gemv(x, site.module.weight)[0]])])
    with emulated_mlx():
        wrong = erring(trial) if op in CHAINED else check(trial)
        counts = asked(site, trial.x(0))
    launches = launched(trial)
    against = ERROR if op in CHAINED else OWN_BITS if trial.truth else BITS
    return {
        "op": op,
        "shape": site.shape,
        "rows": rows,
        **launches,
        "against": against,
        "wrong": wrong,
        **counts,
    }


def erring(trial: KernelTrial) -> str | None:
    """Return a message on a row whose error, relative to its size, exceeds the op's roundings in CHAINED, or None.

    The median of several draws is used, because a norm of nearly zero sometimes magnifies roundings.
    """
    allowed, errors = CHAINED[trial.op] * mx.finfo(mx.bfloat16).eps, [_errors(trial, i) for i in range(TRIES)]
    for i, found in enumerate(zip(*errors, strict=True)):
        if not (error := median(found)) <= allowed:
            return f"row {i + 1} of {trial.rows} errs by {error:.2g} of its size where {allowed:.2g} is allowed"
    return None


def _errors(trial: KernelTrial, draw: int) -> list[float]:
    """Return each row's error for one draw: RMS difference from float32 over the row's RMS, maximum over outputs."""
    x, (ours, theirs) = trial.x(draw), trial.pairs[0]
    found = ours(x)  # first: its cache is then in the kernel's type, in which alone the kernel runs
    exact = (trial.alone[0] if trial.alone else theirs)(x.astype(mx.float32))
    errors = []
    for y, t in zip(found, exact, strict=True):
        missed, size = (mx.mean(mx.square(each).reshape(len(x), -1), axis=1) for each in (y - t, t))
        errors.append(mx.sqrt(missed / size))
    largest: Any = mx.max(mx.stack(errors), axis=0).tolist()
    return [error if error == error else float("inf") for error in largest]


@contextmanager
def emulated_mlx() -> Iterator[None]:
    """Emulate our kernels inside the block, and MLX's own for each row of `mx.quantized_matmul`."""
    own = mx.quantized_matmul
    try:
        mx.quantized_matmul = row_by_row
        with emulated():
            yield
    finally:
        mx.quantized_matmul = own


def row_by_row(x: mx.array, w: mx.array, scales: mx.array, biases: mx.array, **format_: Any) -> mx.array:
    """Multiply as mx.quantized_matmul(transpose=True), each row by the kernel that MLX has for one, emulated.

    x of another type than the scales is multiplied by dequantized weights.
    """
    assert format_.pop("transpose", True), "rows of weights only"
    if w.ndim == 3:  # a matrix for each head of x [1, heads, L, K]
        parts = zip(x[0], w, scales, biases, strict=True)
        return mx.stack([row_by_row(*of_head, **format_) for of_head in parts])[None]
    if x.dtype != scales.dtype:  # what is to be exact
        return x @ mx.dequantize(w, scales.astype(x.dtype), biases.astype(x.dtype), **format_).T
    group_size, bits = format_["group_size"], format_["bits"]
    k, n = x.shape[-1], w.shape[0]
    kernel, arrays = stock.chosen(k, n, bits), [w, scales, biases]
    if kernel == "qmv_quad":  # which reads scales past the last row where N is no multiple of 64
        arrays = [mx.concatenate([a, mx.repeat(a[:1], -n % 64, axis=0)]) for a in arrays]
    y, _ = stock.quantized_matvec(x.reshape(-1, k), *arrays, group_size=group_size, bits=bits, kernel=kernel)
    return y[:, :n].reshape(*x.shape[:-1], n)
