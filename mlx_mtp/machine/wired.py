"""Keep a large model's weights resident: MLX's wired limit, set once, at a load, while nothing runs.

A limit that is set while work is under way on another stream has ended in kernel panics of macOS (MLX issue 3186), so
no generation changes it.
"""

import mlx.core as mx

from .memory import in_gb, working_set

AUTO, OFF = "auto", "off"
WiredLimit = int | str
NEARLY_ALL = 0.75  # share of the recommended working set up to which macOS keeps a model resident by itself
_set = 0  # bytes; a process never lowers it


def check_wired_limit(limit: WiredLimit) -> None:
    """Raise ValueError for a limit that is neither bytes, "auto" nor "off", or is more than the GPU recommends."""
    if isinstance(limit, str):
        if limit not in (AUTO, OFF):
            raise ValueError(f"wired_limit={limit!r}: allowed are bytes, {AUTO!r} and {OFF!r}")
        return
    most = working_set()
    if type(limit) is not int or limit < 0:
        raise ValueError(f"wired_limit={limit!r}: allowed are bytes from 0 on, {AUTO!r} and {OFF!r}")
    if most is not None and limit > most:
        there = f"this GPU recommends at most {in_gb(most)} GB; `sudo sysctl iogpu.wired_limit_mb=MB` raises that"
        raise ValueError(f"wired_limit={limit}: {there}")


def wire(weights: int, limit: WiredLimit = AUTO) -> int:
    """Set MLX's wired limit for a model of so many bytes, and return the limit that holds from now on, 0 for none.

    "auto" takes the recommended working set for a model that needs most of it, and sets nothing for a smaller one.
    Call it in a turn, when the model is loaded: work that was submitted is waited for first.
    """
    global _set
    most = working_set()
    if most is None or limit == OFF:
        return _set
    wanted = (most if weights > NEARLY_ALL * most else 0) if limit == AUTO else int(limit)
    if wanted > _set:
        mx.synchronize()
        mx.set_wired_limit(wanted)
        _set = wanted
    return _set
