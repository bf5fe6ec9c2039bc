"""Choose, per op, how kernels write the multiply-adds of MLX's own sums (`kernels/contraction.h`).

MLX's library is compiled before its installation, these kernels at run time. The two compilers may fuse products and
sums differently, and then few rows have MLX's bits. A kernel trial finds the spelling that has them.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

AS_COMPILED = "AS_COMPILED"  # the compiler's choice; right if it was the same for MLX's library
EXPLICIT = ("SEPARATE", "FUSED", "FUSED_ACROSS")  # independent of the compiler; the likeliest first
SPELLINGS = (AS_COMPILED, *EXPLICIT)  # their numbers are those of `kernels/contraction.h`
# The files whose spelling a trial of the op decides. Trials of heads and experts compare no products with MLX's, so
# their files have the spelling of the ops with the same products.
KERNELS = {
    "verify_qmm": ("verify_qmm", "verify_head", "moe_glu", "moe_relu2", "moe_down"),
    "verify_qmm_heads": ("verify_qmm_heads",),
    "verify_glu": ("verify_glu",),
    "verify_gemv": ("verify_gemv", "verify_dot", "verify_head_dense"),
    "add_norm": ("add_norm",),
    "norm_rope": ("norm_rope",),
    "gated_delta_verify": ("delta_inputs", "gated_norm"),
}
FOLLOWS = {"verify_head": "verify_qmm", "verify_moe": "verify_qmm"}

_taken: dict[str, list[str]] = {}  # spellings by op, the latest op last; the last of an op is in use
_in_use: dict[str, str] = {}  # by file


class _TriedSpellings(threading.local):
    """The spellings that a thread tries, by file."""

    def __init__(self) -> None:
        self.tried: dict[str, str] = {}


_thread = _TriedSpellings()


def kernel_spelling(kernel: str) -> str:
    """Return the spelling, one of SPELLINGS, in use for a `.metal` file: the one tried in this thread comes first."""
    return _thread.tried.get(kernel) or _in_use.get(kernel, AS_COMPILED)


def spelling(op: str) -> str:
    """Return the spelling in use for an op, one of SPELLINGS: how its kernels write multiply-adds.

    Until the op's trial it is the spelling taken last by any op, at first AS_COMPILED. In a thread that is inside
    `spelled` for the op, it is the spelling of that block.
    `verify_head` and `verify_moe` have that of `verify_qmm`; other ops without MLX's sums have AS_COMPILED.
    """
    op = FOLLOWS.get(op, op)
    return kernel_spelling(KERNELS[op][0]) if op in KERNELS else AS_COMPILED


def take(op: str, spelling: str) -> None:
    """Use a spelling from now on, in all threads, for an op and for ops before their trial.

    An op that is not in KERNELS, or took this spelling last, changes nothing.
    """
    if op in KERNELS and _taken.get(op, [""])[-1] != spelling:
        _taken[op] = [*_taken.pop(op, ()), spelling]
        for each, kernels in KERNELS.items():
            _in_use.update(dict.fromkeys(kernels, _taken.get(each, [spelling])[-1]))


def is_taken(op: str) -> bool:
    """Return whether a trial of the op, now or in an earlier process, has decided its spelling."""
    return op in _taken


def others(op: str) -> list[str]:
    """Return the spellings that an op neither has nor has ever taken, the likeliest first; [] if not in KERNELS."""
    if op not in KERNELS:
        return []
    order = dict.fromkeys((_latest(), *EXPLICIT, AS_COMPILED))
    return [each for each in order if each not in (*_taken.get(op, ()), spelling(op))]


@contextmanager
def spelled(op: str, spelling: str) -> Iterator[None]:
    """Launch the op's kernels with this spelling in the block, in this thread; KeyError for an op not in KERNELS."""
    before = _thread.tried
    _thread.tried = {**before, **dict.fromkeys(KERNELS[op], spelling)}
    try:
        yield
    finally:
        _thread.tried = before


def _latest() -> str:
    """Return the spelling that was taken last, by any op; AS_COMPILED if none was."""
    return next(reversed(_taken.values()))[-1] if _taken else AS_COMPILED
