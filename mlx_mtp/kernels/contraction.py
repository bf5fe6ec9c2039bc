"""Choose how each op's kernels spell the multiply-adds of MLX's own sums (`kernels/contraction.h`).

MLX's library is compiled before it is installed, these kernels when they run: the two compilers may fuse a product and
a sum differently, and then no row has MLX's bits. Which spelling has them holds for an op, whatever its shapes.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

AS_COMPILED = "AS_COMPILED"  # the compiler's choice: right where it makes the same one in MLX's library
EXPLICIT = ("SEPARATE", "FUSED", "FUSED_ACROSS")  # spellings that no compiler changes, the likeliest first
SPELLINGS = (AS_COMPILED, *EXPLICIT)
KERNELS = {
    "verify_qmm": ("verify_qmm",),
    "verify_qmm_heads": ("verify_qmm_heads",),
    "verify_glu": ("verify_glu",),
    "verify_gemv": ("verify_gemv", "verify_dot"),
    "verify_head": ("verify_head", "verify_head_dense"),
    "verify_moe": ("moe_glu", "moe_relu2", "moe_down"),
    "add_norm": ("add_norm",),
    "norm_rope": ("norm_rope",),
    "gated_delta_verify": ("delta_inputs", "gated_norm"),  # the recurrence's own kernel repeats one of mlx-lm's,
    # which is compiled as ours are
}
OP_OF = {kernel: op for op, kernels in KERNELS.items() for kernel in kernels}

_taken: dict[str, list[str]] = {}  # by op, the op that has taken one last at the end; of each the last is in use


class _Tried(threading.local):
    """The op and the spelling that this thread tries."""

    op, spelling = "", AS_COMPILED


_tried = _Tried()


def spelling(op: str) -> str:
    """Return the spelling in use for an op: its own, or the one that another op has taken last."""
    if op not in KERNELS:
        return AS_COMPILED
    if op == _tried.op:
        return _tried.spelling
    return _taken[op][-1] if op in _taken else _latest()


def kernel_spelling(kernel: str) -> str:
    """Return the spelling of a `.metal` file's text."""
    return spelling(OP_OF.get(kernel, ""))


def take(op: str, spelling: str) -> None:
    """Use a spelling for an op from now on, in all threads."""
    if op in KERNELS and (op not in _taken or _taken[op][-1] != spelling):
        _taken[op] = [*_taken.pop(op, ()), spelling]


def is_taken(op: str) -> bool:
    """Return whether a trial of the op, or what an earlier process remembered of one, has chosen its spelling."""
    return op in _taken


def others(op: str) -> list[str]:
    """List the spellings to try when the one in use is wrong: those that the op has not given up, the likeliest first."""
    if op not in KERNELS:
        return []
    order = dict.fromkeys((_latest(), *EXPLICIT, AS_COMPILED))
    return [each for each in order if each not in (*_taken.get(op, ()), spelling(op))]


@contextmanager
def spelled(op: str, spelling: str) -> Iterator[None]:
    """Launch the op's kernels in another spelling inside, in this thread."""
    before = _tried.op, _tried.spelling
    _tried.op, _tried.spelling = op, spelling
    try:
        yield
    finally:
        _tried.op, _tried.spelling = before


def _latest() -> str:
    """Return the spelling that an op has taken last, for ops that have taken none."""
    return next(reversed(_taken.values()))[-1] if _taken else AS_COMPILED
